"""Checkpoints: whole or not there.

A checkpoint is written to a temporary folder, described by a manifest with sizes and checksums, and renamed. Reading
believes the manifest only. Tensors are safetensors and the rest is JSON, so a file from elsewhere is data, never code.
Tensors are copied when `save` is called and written by a thread, so training does not wait for the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vit_scale.errors import UserError
from vit_scale.train.state import TrainState

Tensors = dict[str, torch.Tensor]


# ------------------------------------------------------------------------------------------------------- the snapshot


def snapshot(state: TrainState) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Copies of all tensors by file name, and the numbers, as they are now."""
    tensors = {"model": _copy(state.model.state_dict())}
    optimizer, numbers = _optimizer_state(state)
    tensors["optimizer"] = _copy(optimizer)
    if state.ema is not None:
        tensors["ema"] = _copy(state.ema.shadow)
    meta = {
        "step": state.step,
        "best_top1": state.best_top1,
        "best_step": state.best_step,
        "bad_steps": int(state.bad_steps.item()),
        "optimizer_numbers": numbers,
    }
    return tensors, meta


def restore(state: TrainState, folder: Path) -> dict[str, Any]:
    """Put the checkpoint in `folder` into `state`; returns its meta.json."""
    meta = json.loads((folder / "meta.json").read_text())
    state.model.load_state_dict(load_file(folder / "model.safetensors"))
    _load_optimizer_state(state, load_file(folder / "optimizer.safetensors"), meta["optimizer_numbers"])
    if state.ema is not None:
        state.ema.load(load_file(folder / "ema.safetensors"))
    state.step, state.best_top1, state.best_step = meta["step"], meta["best_top1"], meta["best_step"]
    state.bad_steps.fill_(meta["bad_steps"])
    return meta


def _copy(tensors: Tensors) -> Tensors:
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def _parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    return {p: name for name, p in model.named_parameters()}


def _optimizer_state(state: TrainState) -> tuple[Tensors, dict[str, Any]]:
    """The optimiser's state as `<parameter>/<key>`: by name, so that it fits any grouping of the parameters."""
    tensors: Tensors = {}
    numbers: dict[str, Any] = {}
    names = _parameter_names(state.model)
    for p, entries in state.optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{names[p]}/{key}"] = value
            elif value is not None:
                numbers[f"{names[p]}/{key}"] = value
    return tensors, numbers


def _load_optimizer_state(state: TrainState, tensors: Tensors, numbers: dict[str, Any]) -> None:
    params = dict(state.model.named_parameters())
    for entry, value in [*tensors.items(), *numbers.items()]:
        name, _, key = entry.rpartition("/")
        p = params[name]
        if isinstance(value, torch.Tensor):
            value = value.to(p.device)
        state.optimizer.state[p][key] = value


# ---------------------------------------------------------------------------------------------------- the folder


class CheckpointFolder:
    """The `checkpoints/` of a run: saves in the background, keeps the newest few and the best."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self.path = run_folder / "checkpoints"
        self.keep = keep
        self.problem: str | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, state: TrainState, extra: dict[str, Any]) -> None:
        """Copy `state` now and write it in the background; a failure is kept in `problem` and stops nothing."""
        self.wait()
        tensors, meta = snapshot(state)
        self._writing = self._writer.submit(self._write, tensors, meta | extra)

    def wait(self) -> None:
        """Return when what was being written is written, or has failed."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        except OSError as error:
            self.problem = f"checkpoint not saved: {error}; training goes on, earlier checkpoints are whole"
        self._writing = None

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def _write(self, tensors: dict[str, Tensors], meta: dict[str, Any]) -> None:
        final = self.path / f"step-{meta['step']:08d}"
        partial = self.path / f".partial-{meta['step']:08d}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            for name, group in tensors.items():
                save_file(group, partial / f"{name}.safetensors")
            (partial / "meta.json").write_text(json.dumps(meta, indent=1))
            (partial / "manifest.json").write_text(json.dumps(_describe(partial), indent=1))
            _to_disk(partial)
            if final.exists():  # the same step saved again after a resume
                shutil.rmtree(final)
            os.rename(partial, final)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._remove_old(meta["best_step"])

    def _remove_old(self, best_step: int) -> None:
        best = f"step-{best_step:08d}"
        for old in list_checkpoints(self.path)[: -self.keep]:
            if old.name != best:
                shutil.rmtree(old, ignore_errors=True)


def _describe(folder: Path) -> dict[str, Any]:
    files = sorted(p for p in folder.iterdir() if p.name != "manifest.json")
    return {"files": {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _slow(file)


def _slow(file: Any) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _to_disk(folder: Path) -> None:
    """A rename must not reach the disk before the bytes it names."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def step_of(checkpoint: Path) -> int:
    """Updates done when `checkpoint` was saved."""
    return json.loads((checkpoint / "meta.json").read_text())["step"]


def what_is_wrong(checkpoint: Path) -> str | None:
    """None for a whole checkpoint, else what is wrong with it."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "it has no readable manifest"
    for name, entry in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
        if _sha256(path) != entry["sha256"]:
            return f"{name} does not match its checksum"
    return None


def newest_whole(run_folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a line for each newer one that is not."""
    problems = []
    for checkpoint in reversed(list_checkpoints(run_folder / "checkpoints")):
        wrong = what_is_wrong(checkpoint)
        if wrong is None:
            return checkpoint, problems
        problems.append(f"{checkpoint.name} is not used: {wrong}")
    return None, problems


def find_checkpoint(resume: str, run_folder: Path) -> tuple[Path | None, list[str]]:
    """What to go on from, by `run.resume`, and lines about what could not be used."""
    if resume == "never":
        return None, []
    if resume == "auto":
        return newest_whole(run_folder)
    path = Path(resume)
    if not path.is_dir():
        raise UserError(f"run.resume = {resume!r}: there is no such checkpoint or run; use auto, never or a path")
    if (path / "checkpoints").is_dir():
        return newest_whole(path)
    wrong = what_is_wrong(path)
    if wrong:
        raise UserError(f"run.resume = {resume!r}: not a whole checkpoint: {wrong}")
    return path, []
