"""Final weights of a finished run: model.safetensors and, with an EMA, model_ema.safetensors.

Of a composite they have the backbone, and rest.safetensors and rest_ema.safetensors the layers added to it.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from vit_scale.checkpoints.host_copies import HostCopies, Tensors
from vit_scale.checkpoints.pieces import Snapshot
from vit_scale.checkpoints.run_dir import unused_path
from vit_scale.checkpoints.run_weights import FINAL, REST, Kind, split_composite
from vit_scale.errors import UserError
from vit_scale.files import describe_write_error, replacing


def write_final_weights(snapshot: Snapshot, run_dir: Path, *, is_main: bool) -> list[Path]:
    """Write the final weights to `run_dir` and return their paths; all ranks must call it.

    Rank 0 collects every tensor before it writes the first file: if a write fails, no rank waits for it. Raises
    `UserError` if a copy does not fit in host memory or a file cannot be written.
    """
    weights, ema = _collect(snapshot, run_dir)
    if not is_main:
        return []
    paths = _write_both(weights, run_dir, "raw")
    return paths + _write_both(weights | ema, run_dir, "ema") if ema else paths


def rename_final_weights(run_dir: Path) -> None:
    """Rename the final weights of a run that is rolled back: they are those of steps that will be rerun."""
    for path in (run_dir / name for name in (*FINAL.values(), *REST.values())):
        if path.is_file():
            path.rename(unused_path(path))


def _collect(snapshot: Snapshot, run_dir: Path) -> tuple[Tensors, Tensors]:
    """Return copies of the weights and the EMA weights; exhaust both iterators even if memory runs out."""
    copies = HostCopies()
    collected: list[Tensors] = []
    failure: MemoryError | None = None
    for kind, tensors in (("raw", snapshot.whole), ("ema", snapshot.whole_ema)):
        try:
            collected.append(copies.take(kind, tensors()))
        except MemoryError as error:
            failure = error
    if failure is not None:
        raise UserError(
            f"{run_dir}: not enough host memory to collect the final weights ({failure}).\n"
            "Training is complete. Free some host memory and rerun the same command to write the weights."
        ) from failure
    weights, ema = collected
    return weights, ema


def _write_both(tensors: Tensors, run_dir: Path, kind: Kind) -> list[Path]:
    """Write a model, or the backbone of a composite and its other layers; return the paths."""
    backbone, rest = split_composite(tensors)
    # The other layers first: without them, the backbone would be taken for the entire model.
    files = {run_dir / REST[kind]: rest, run_dir / FINAL[kind]: backbone}
    for path, part in files.items():
        if part:
            _write(part, path)
    return [path for path, part in reversed(files.items()) if part]


def _write(tensors: Tensors, path: Path) -> None:
    with replacing(path) as partial:
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
            partial.chmod(0o644)  # safetensors makes its files readable by their owner only
        except (OSError, SafetensorError) as error:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            reason = describe_write_error(error, path.parent, {partial.name: size})
            raise UserError(
                f"{path} could not be written: {reason}.\n"
                "Training is complete. Free some disk space and rerun the same command to write the weights."
            ) from error
