"""Finding the checkpoint to go on from, and reading it.

A checkpoint is believed only as far as its manifest goes. Tensors are safetensors and the rest is JSON: a file from
elsewhere is data, never code. What it holds, and how it is written, is in `checkpoint.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from vit_scale.checkpoints.checked_files import damage
from vit_scale.checkpoints.host_copies import Tensors
from vit_scale.checkpoints.writer import list_checkpoints, step_of
from vit_scale.errors import UserError
from vit_scale.strategies.shards import Piece
from vit_scale.train.state import TrainState

META = {"step", "best_step", "bad_steps", "plan"}
"""What resuming reads of meta.json."""

# ----------------------------------------------------------------------------------------------------------- finding


def find_checkpoint(resume: str, run_folder: Path) -> tuple[Path | None, list[str]]:
    """What to go on from, by `run.resume`, and lines about what could not be used."""
    if resume == "never":
        return None, []
    if resume == "auto":
        return newest_whole(run_folder)
    path = Path(resume)
    if path.is_file():
        raise UserError(f"run.resume = {resume!r}: a checkpoint is a folder; for a file of weights use model.weights")
    if not path.is_dir():
        raise UserError(f"run.resume = {resume!r}: there is no such checkpoint or run; use auto, never or a path")
    if (path / "checkpoints").is_dir():
        return newest_whole(path)
    wrong = what_is_wrong(path)
    if wrong:
        raise UserError(f"run.resume = {resume!r}: not a whole checkpoint: {wrong}")
    return path, []


def newest_whole(run_folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and lines about newer ones that are not."""
    problems: list[str] = []
    lost = 0
    for checkpoint in reversed(list_checkpoints(run_folder / "checkpoints")):
        wrong = what_is_wrong(checkpoint)
        if wrong is None:
            return checkpoint, [*problems, *_loss(step_of(checkpoint), lost)]
        lost = max(lost, step_of(checkpoint))
        problems.append(f"{checkpoint.name} is not used: {wrong}.")
    return None, [*problems, *_loss(0, lost)]


def _loss(kept: int, lost: int) -> list[str]:
    return [f"Steps {kept + 1:,} to {lost:,} are done again."] if lost else []


def what_is_wrong(checkpoint: Path) -> str | None:
    """None for a whole checkpoint, else what is wrong with it."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        entries = {checkpoint / name: {key: entry[key] for key in ("bytes", "crc32")} for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "it has no readable manifest"
    if not {"model.safetensors", "meta.json"} <= files.keys():
        return "its manifest names no weights"
    for path, entry in entries.items():
        if wrong := damage(path, entry):
            return wrong
    return None if _has_meta(checkpoint) else "its meta.json is not that of a checkpoint"


def _has_meta(checkpoint: Path) -> bool:
    try:
        return read_meta(checkpoint).keys() >= META
    except (OSError, ValueError, AttributeError):
        return False


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """meta.json: what a checkpoint says of itself besides tensors."""
    return json.loads((checkpoint / "meta.json").read_text())


# ----------------------------------------------------------------------------------------------------------- reading


def restore(state: TrainState, folder: Path) -> None:
    """Put the checkpoint in `folder` into `state`; all processes must call it."""
    try:
        weights, shards = load_file(folder / "model.safetensors"), _ShardReader(folder)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}: its files are not those of a checkpoint: {error}") from error
    _check_shapes(state, weights, folder)
    _fill_module(state, weights)
    for name, piece in state.shards.weights(owned=False).items():
        _fill_from(piece, weights[name])
    state.shards.make_optimizer_state(shards.optimizer_keys, shards.scalars)
    for key, pieces in state.shards.optimizer_tensors(owned=False).items():
        for name, piece in pieces.items():
            shards.fill(f"optimizer/{key}/{name}", piece)
    if state.ema is not None:
        for name, piece in state.ema.pieces().items():
            if not shards.fill(f"ema/{name}", piece):  # the run so far kept no average: it starts here
                _fill_from(piece, weights[name])
    state.shards.publish()
    meta = read_meta(folder)
    state.step, state.best_step = meta["step"], meta["best_step"]
    state.best = meta.get("best", meta.get("best_top1"))  # its name in earlier versions
    state.bad_steps.fill_(meta["bad_steps"])
    if state.loss_scale is not None and meta.get("loss_scale"):
        state.loss_scale.restore(meta["loss_scale"])


def _check_shapes(state: TrainState, weights: Tensors, folder: Path) -> None:
    own = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in state.model.named_parameters()}  # ZeRO-3 cuts up
    for name, shape in own.items():
        found = list(weights[name].shape) if name in weights else None
        if found != shape:
            raise UserError(f"{folder}: a checkpoint of another model: {name} is {found} there and {shape} here")


def _fill_from(piece: Piece, whole: Any) -> None:
    piece.tensor.copy_(whole.reshape(-1)[piece.start : piece.start + piece.tensor.numel()])


def _fill_module(state: TrainState, weights: Tensors) -> None:
    """What is not trained: buffers and frozen parameters."""
    trained = {name for name, p in state.model.named_parameters() if p.requires_grad}
    own = state.model.state_dict()
    for name, value in weights.items():
        if name not in trained and own[name].shape == value.shape:  # ZeRO-3 has cut up frozen ones
            own[name].copy_(value)


class _ShardReader:
    """All shards of a checkpoint as one: any run of any flattened tensor, whoever wrote it."""

    def __init__(self, folder: Path) -> None:
        self.scalars: dict[str, dict[str, Any]] = {}
        self._where: dict[str, list[tuple[Any, int]]] = {}
        for path in sorted(folder.glob("shard-*.safetensors")):
            file = safe_open(path, framework="pt")
            metadata = file.metadata()
            for key, start in json.loads(metadata["starts"]).items():
                self._where.setdefault(key, []).append((file, start))
            for name, entries in json.loads(metadata["numbers"]).items():
                self.scalars.setdefault(name, {}).update(entries)
            for key in file.keys():  # noqa: SIM118 -- not a dict
                if key.startswith("scalar/"):
                    _, entry, name = key.split("/")
                    self.scalars.setdefault(name, {})[entry] = file.get_tensor(key)

    def optimizer_keys(self, name: str) -> list[str]:
        """What the optimiser remembers of this parameter, such as `exp_avg`."""
        parts = (key.split("/") for key in self._where if key.startswith("optimizer/"))
        return [key for _, key, parameter in parts if parameter == name]

    def fill(self, key: str, piece: Piece) -> bool:
        """Copy into `piece` what the shards have of it; False where they have nothing."""
        wanted, end = piece.start, piece.start + piece.tensor.numel()
        for file, start in self._where.get(key, []):
            stored = file.get_slice(key)
            first, last = max(wanted, start), min(end, start + stored.get_shape()[0])
            if first < last:
                piece.tensor[first - wanted : last - wanted] = stored[first - start : last - start].to(
                    piece.tensor.device
                )
        return key in self._where
