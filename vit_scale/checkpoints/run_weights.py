"""Weights of a run, finished or not: which files contain them, and the EMA assembled from a checkpoint's shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from vit_scale.checkpoints.find import checkpoint_error, latest_valid_checkpoint, list_checkpoints, read_meta
from vit_scale.checkpoints.run_dir import read_summary
from vit_scale.errors import UserError

StateDict = dict[str, torch.Tensor]
Kind = Literal["ema", "raw"]
FINAL: dict[Kind, str] = {"ema": "model_ema.safetensors", "raw": "model.safetensors"}
"""Weights files of a finished run, under timm's names: those of the model, or of a composite's backbone."""
REST: dict[Kind, str] = {"ema": "rest_ema.safetensors", "raw": "rest.safetensors"}
"""Weights files of the layers that a composite adds to its backbone, such as a decoder."""
BACKBONE = "backbone."
"""Prefix of the names of a composite's backbone parameters, in checkpoints too."""


@dataclass(frozen=True)
class RunWeights:
    """Location of the weights of a run."""

    path: Path
    """A weights file or a checkpoint directory."""
    kind: Kind
    step: int | None = None
    """Step of the checkpoint; None for final weights."""

    def read(self) -> StateDict:
        """Return full tensors under timm's names, of a composite under its own: `backbone.<timm's name>` and others."""
        try:
            if self.path.is_file():
                return _joined(load_file(self.path), self.path.with_name(REST[self.kind]))
            weights = load_file(self.path / "model.safetensors")
            return weights | _read_ema(self.path, weights) if self.kind == "ema" else weights
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise UserError(
                f"{self.path}: cannot read the weights ({error}); if the run is in progress, try again."
            ) from error

    def __str__(self) -> str:
        kind = "EMA" if self.kind == "ema" else "raw"
        return f"{kind} weights of {self.path}"


def find_run_weights(path: Path, kind: Kind | None = None) -> RunWeights:
    """Find the weights of a run directory or a checkpoint directory; `kind` None: EMA weights if available.

    These are the final weights if the run is finished, otherwise those of its latest valid checkpoint.
    """
    if (path / "meta.json").is_file():
        return _checkpoint_weights(path, kind)
    finished = read_summary(path).get("finished") or not list_checkpoints(path / "checkpoints")
    checkpoint = None if finished else latest_valid_checkpoint(path)[0]
    if checkpoint is not None:
        return _checkpoint_weights(checkpoint, kind)
    for each in (kind,) if kind else ("ema", "raw"):
        if (path / FINAL[each]).is_file():
            return RunWeights(path / FINAL[each], each)
    if kind == "ema" and (path / FINAL["raw"]).is_file():
        raise _no_ema(path)
    raise UserError(
        f"{path}: no weights yet: neither {' nor '.join(FINAL.values())} nor a valid checkpoint; "
        "has the run finished, or saved once (run.save_every)?"
    )


def _checkpoint_weights(checkpoint: Path, kind: Kind | None) -> RunWeights:
    if error := checkpoint_error(checkpoint):
        raise UserError(f"{checkpoint}: invalid checkpoint: {error}")
    has_ema = next(_ema_keys(checkpoint), None) is not None
    if kind == "ema" and not has_ema:
        raise _no_ema(checkpoint)
    return RunWeights(checkpoint, kind or ("ema" if has_ema else "raw"), step=read_meta(checkpoint)["step"])


def _no_ema(path: Path) -> UserError:
    return UserError(f"{path}: the run has no EMA weights (ema.decay = 0); use the raw weights.")


def _ema_keys(checkpoint: Path) -> Iterator[tuple[Any, str, int]]:
    """Yield each piece of the EMA: its file, its key, and where it starts in the flattened tensor."""
    for path in sorted(checkpoint.glob("shard-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key, start in json.loads(file.metadata()["starts"]).items():
                if key.startswith("ema/"):
                    yield file, key, start


def split_composite(weights: StateDict) -> tuple[StateDict, StateDict]:
    """Return the backbone of a composite under timm's names, and its other layers; other models have none."""
    backbone = {name.removeprefix(BACKBONE): each for name, each in weights.items() if name.startswith(BACKBONE)}
    if not backbone:
        return weights, {}
    return backbone, {name: tensor for name, tensor in weights.items() if not name.startswith(BACKBONE)}


def _joined(weights: StateDict, rest: Path) -> StateDict:
    """Undo `split_composite` if there is a file of other layers."""
    if not rest.is_file():
        return weights
    return {BACKBONE + name: tensor for name, tensor in weights.items()} | load_file(rest)


def _read_ema(checkpoint: Path, weights: StateDict) -> StateDict:
    """Assemble the EMA weights from the pieces that the ranks of the run owned."""
    ema: StateDict = {}
    for file, key, start in _ema_keys(checkpoint):
        name = key.removeprefix("ema/")
        piece = file.get_tensor(key)
        full = ema.setdefault(name, torch.empty_like(weights[name], dtype=torch.float32))
        full.view(-1)[start : start + piece.numel()] = piece.reshape(-1)
    return ema
