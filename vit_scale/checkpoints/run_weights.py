"""The weights of a run, finished or not: which files hold them, and the average put together from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from vit_scale.errors import UserError

StateDict = dict[str, torch.Tensor]
Kind = Literal["ema", "raw"]
FINAL: dict[Kind, str] = {"ema": "model_ema.safetensors", "raw": "model.safetensors"}
"""Files of a finished run."""


@dataclass(frozen=True)
class RunWeights:
    """Where weights of a run are."""

    path: Path
    """A file, or the folder of a checkpoint."""
    kind: Kind
    step: int | None = None
    """Of a checkpoint."""

    def read(self) -> StateDict:
        """Whole tensors under timm's names."""
        try:
            if self.path.is_file():
                return load_file(self.path)
            weights = load_file(self.path / "model.safetensors")
            return weights | _read_average(self.path, weights) if self.kind == "ema" else weights
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise UserError(
                f"{self.path}: the weights cannot be read ({error}); a run in progress may try again."
            ) from error

    def __str__(self) -> str:
        kind = "averaged (EMA)" if self.kind == "ema" else "raw"
        return f"{kind} weights of {self.path}"


def find_run_weights(folder: Path, kind: Kind | None = None) -> RunWeights:
    """The weights of a run's folder or of a checkpoint's; `kind` None: the average where there is one.

    Final weights if the run is finished, else the newest whole checkpoint: a run still going on can be looked at.
    """
    from vit_scale.checkpoints.reader import newest_whole
    from vit_scale.checkpoints.run_dir import read_summary
    from vit_scale.checkpoints.writer import list_checkpoints

    if (folder / "meta.json").is_file():
        return _of_checkpoint(folder, kind)
    checkpoints = list_checkpoints(folder / "checkpoints")
    finished = read_summary(folder).get("finished") or not checkpoints
    checkpoint = None if finished else newest_whole(folder)[0]
    if checkpoint is not None:
        return _of_checkpoint(checkpoint, kind)
    for each in (kind,) if kind else ("ema", "raw"):
        if (folder / FINAL[each]).is_file():
            return RunWeights(folder / FINAL[each], each)
    if kind == "ema" and (folder / FINAL["raw"]).is_file():
        raise _no_average(folder)
    raise UserError(
        f"{folder}: no weights yet: neither {' nor '.join(FINAL.values())} nor a whole checkpoint; "
        "has the run finished, or saved once (run.save_every)?"
    )


def _of_checkpoint(checkpoint: Path, kind: Kind | None) -> RunWeights:
    from vit_scale.checkpoints.reader import read_meta, what_is_wrong

    if wrong := what_is_wrong(checkpoint):
        raise UserError(f"{checkpoint}: not a whole checkpoint: {wrong}")
    averaged = next(_average_keys(checkpoint), None) is not None
    if kind == "ema" and not averaged:
        raise _no_average(checkpoint)
    return RunWeights(checkpoint, kind or ("ema" if averaged else "raw"), step=read_meta(checkpoint)["step"])


def _no_average(folder: Path) -> UserError:
    return UserError(f"{folder}: the run kept no averaged weights (ema.decay = 0); use the raw ones.")


def _average_keys(checkpoint: Path) -> Iterator[tuple[Any, str, int]]:
    """Each piece of the average: its file, its key, and where in the flattened tensor it starts."""
    for path in sorted(checkpoint.glob("shard-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key, start in json.loads(file.metadata()["starts"]).items():
                if key.startswith("ema/"):
                    yield file, key, start


def _read_average(checkpoint: Path, weights: StateDict) -> StateDict:
    """The average of every weight, put together from the pieces that the processes of the run owned."""
    average: StateDict = {}
    for file, key, start in _average_keys(checkpoint):
        name = key.removeprefix("ema/")
        piece = file.get_tensor(key)
        whole = average.setdefault(name, torch.empty_like(weights[name], dtype=torch.float32))
        whole.view(-1)[start : start + piece.numel()] = piece.reshape(-1)
    return average
