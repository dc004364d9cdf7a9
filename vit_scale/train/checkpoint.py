"""Checkpoints: whole or not there, and readable by any number of processes under any strategy.

    checkpoints/step-00001000/
      model.safetensors        weights and buffers, whole, in fp32, under timm's names
      shard-00000.safetensors  pieces of the optimiser's state and of the EMA that process 0 owns, and so on
      meta.json                step, best result, options of the run, versions, W&B id
      manifest.json            size and checksum of each file

Tensors are copied when `save` is called and written by a thread, so training does not wait for the disk. Each process
writes its shard; the main process waits for all of them, writes the manifest and renames the folder. Reading believes
the manifest only. Tensors are safetensors and the rest is JSON: a file from elsewhere is data, never code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vit_scale.errors import UserError
from vit_scale.train.shards import Piece, Pieces
from vit_scale.train.state import TrainState

Tensors = dict[str, torch.Tensor]
SECONDS_TO_WAIT_FOR_SHARDS = 600.0


# ------------------------------------------------------------------------------------------------------------ saving


class CheckpointFolder:
    """The `checkpoints/` of a run: saves in the background, keeps the newest few and the best."""

    def __init__(self, run_folder: Path, *, keep: int, rank: int, world: int, session: str) -> None:
        """`session` is a word that all processes of this start share and no earlier start had."""
        self.path = run_folder / "checkpoints"
        self.keep, self.rank, self.world, self.session = keep, rank, world, session
        self._problem: str | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        if rank == 0:
            for leftover in self.path.glob(".partial-*"):
                if not leftover.name.endswith(session):
                    shutil.rmtree(leftover, ignore_errors=True)

    def save(self, state: TrainState, meta: dict[str, Any]) -> None:
        """Copy `state` now and write it in the background; all processes must call it.

        A failure to write stops nothing; `problem()` tells of it.
        """
        self.wait()
        weights = state.shards.state_dict()
        files = {f"shard-{self.rank:05d}.safetensors": _shard(state)}
        if self.rank == 0:
            files["model.safetensors"] = (_copy(weights), {})
        self._writing = self._writer.submit(self._write, state.step, state.best_step, files, numbers(state) | meta)

    def problem(self) -> str | None:
        """What went wrong with a save since the last call."""
        problem, self._problem = self._problem, None
        return problem

    def wait(self) -> None:
        """Return when what was being written is written, or has failed."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        except Exception as error:  # noqa: BLE001 -- whatever it is, training goes on
            self._problem = (
                f"A checkpoint could not be saved: {error}. Training goes on; earlier checkpoints are whole."
            )
        self._writing = None

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def _write(self, step: int, best: int, files: dict[str, tuple[Tensors, dict[str, str]]], meta: Any) -> None:
        partial = self.path / f".partial-{step:08d}-{self.session}"
        partial.mkdir(parents=True, exist_ok=True)
        try:
            for name, (tensors, metadata) in files.items():
                save_file(tensors, partial / name, metadata)
            if self.rank == 0:
                (partial / "meta.json").write_text(json.dumps(meta, indent=1, default=str))
            mine = [*files, "meta.json"] if self.rank == 0 else list(files)
            self._write_receipt(partial, {"files": {name: _describe(partial / name) for name in mine}})
            if self.rank == 0:
                self._commit(partial, step, best)
        except Exception as error:
            message = _explain(error, partial, files)
            self._write_receipt(partial, {"error": message}, may_fail=True)
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise OSError(message) from error

    def _write_receipt(self, partial: Path, receipt: dict[str, Any], may_fail: bool = False) -> None:
        """Tell the main process, through the folder, that this process has done its part."""
        try:
            waiting = partial / f".receipt-{self.rank:05d}"
            waiting.write_text(json.dumps(receipt))
            waiting.rename(partial / f"receipt-{self.rank:05d}.json")
        except OSError:
            if not may_fail:
                raise

    def _commit(self, partial: Path, step: int, best: int) -> None:
        files: dict[str, Any] = {}
        deadline = time.monotonic() + SECONDS_TO_WAIT_FOR_SHARDS
        for rank in range(self.world):
            receipt = partial / f"receipt-{rank:05d}.json"
            while not receipt.exists():
                if time.monotonic() > deadline:
                    raise OSError(f"process {rank} did not write its part; is {self.path} on a shared disk?")
                time.sleep(0.02)
            content = json.loads(receipt.read_text())
            if "error" in content:
                raise OSError(content["error"])
            files |= content["files"]
            receipt.unlink()
        (partial / "manifest.json").write_text(json.dumps({"files": files}, indent=1))
        _to_disk(partial / "manifest.json", partial)
        final = self.path / f"step-{step:08d}"
        if final.exists():  # the same step again after going back to an earlier checkpoint
            shutil.rmtree(final)
        partial.rename(final)
        _to_disk(self.path)
        self._remove_old(best)

    def _remove_old(self, best: int) -> None:
        for old in list_checkpoints(self.path)[: -self.keep]:
            if old.name != f"step-{best:08d}":
                shutil.rmtree(old, ignore_errors=True)


def numbers(state: TrainState) -> dict[str, Any]:
    """The state that is not tensors."""
    return {
        "step": state.step,
        "best_top1": state.best_top1,
        "best_step": state.best_step,
        "bad_steps": int(state.bad_steps.item()),
    }


def _shard(state: TrainState) -> tuple[Tensors, dict[str, str]]:
    """Copies of what this process owns of optimiser and EMA, and where each piece starts."""
    groups: dict[str, Pieces] = {
        f"optimizer/{key}": pieces for key, pieces in state.shards.optimizer_tensors(owned=True).items()
    }
    if state.ema is not None:
        groups["ema"] = state.ema.pieces()
    pieces = {f"{group}/{name}": piece for group, found in groups.items() for name, piece in found.items()}
    scalars = state.shards.optimizer_scalars()
    tensors = {
        f"scalar/{key}/{name}": value
        for name, entries in scalars.items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    plain = {
        name: {k: v for k, v in entries.items() if not isinstance(v, torch.Tensor)} for name, entries in scalars.items()
    }
    metadata = {
        "starts": json.dumps({key: piece.start for key, piece in pieces.items()}),
        "numbers": json.dumps(plain),
    }
    return _copy({key: piece.tensor for key, piece in pieces.items()} | tensors), metadata


def _copy(tensors: Tensors) -> Tensors:
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def _describe(path: Path) -> dict[str, Any]:
    _to_disk(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _to_disk(*paths: Path) -> None:
    """A rename must not reach the disk before the bytes it names."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _explain(error: Exception, folder: Path, files: dict[str, tuple[Tensors, dict[str, str]]]) -> str:
    """The error, with how much room is missing where that is the reason."""
    needed = sum(t.numel() * t.element_size() for tensors, _ in files.values() for t in tensors.values())
    written = sum(path.stat().st_size for path in folder.glob("*")) if folder.exists() else 0
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    missing = needed - written - free
    return f"{error} ({missing / 1e6:,.1f} MB are missing on the disk)" if missing > 0 else str(error)


# ----------------------------------------------------------------------------------------------------------- reading


def restore(state: TrainState, folder: Path) -> None:
    """Put the checkpoint in `folder` into `state`; all processes must call it."""
    meta = read_meta(folder)
    weights = load_file(folder / "model.safetensors")
    _fill_module(state, weights)
    for name, piece in state.shards.weights(owned=False).items():
        flat = weights[name].reshape(-1)
        piece.tensor.copy_(flat[piece.start : piece.start + piece.tensor.numel()])
    shards = _ShardReader(folder)
    state.shards.make_optimizer_state(shards.optimizer_keys, shards.scalars)
    for key, pieces in state.shards.optimizer_tensors(owned=False).items():
        for name, piece in pieces.items():
            shards.fill(f"optimizer/{key}/{name}", piece)
    if state.ema is not None:
        for name, piece in state.ema.pieces().items():
            shards.fill(f"ema/{name}", piece)
    state.shards.publish()
    state.step, state.best_top1, state.best_step = meta["step"], meta["best_top1"], meta["best_step"]
    state.bad_steps.fill_(meta["bad_steps"])


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

    @property
    def optimizer_keys(self) -> list[str]:
        return list(dict.fromkeys(key.split("/")[1] for key in self._where if key.startswith("optimizer/")))

    def fill(self, key: str, piece: Piece) -> None:
        """Copy into `piece` what the shards have of it."""
        wanted, end = piece.start, piece.start + piece.tensor.numel()
        for file, start in self._where.get(key, []):
            stored = file.get_slice(key)
            first, last = max(wanted, start), min(end, start + stored.get_shape()[0])
            if first < last:
                piece.tensor[first - wanted : last - wanted] = stored[first - start : last - start].to(
                    piece.tensor.device
                )


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """meta.json: what a checkpoint says of itself besides tensors."""
    return json.loads((checkpoint / "meta.json").read_text())


def what_is_wrong(checkpoint: Path) -> str | None:
    """None for a whole checkpoint, else what is wrong with it."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        entries = [(checkpoint / name, entry["bytes"], entry["sha256"]) for name, entry in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "it has no readable manifest"
    if not {"model.safetensors", "meta.json"} <= files.keys():
        return "its manifest names no weights"
    for path, size, checksum in entries:
        if not path.is_file():
            return f"{path.name} is missing"
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size:,} bytes instead of {size:,}"
        if _sha256(path) != checksum:
            return f"{path.name} does not match its checksum"
    return None


def newest_whole(run_folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a line for each newer one that is not."""
    problems: list[str] = []
    for checkpoint in reversed(list_checkpoints(run_folder / "checkpoints")):
        wrong = what_is_wrong(checkpoint)
        if wrong is None:
            return checkpoint, problems
        problems.append(f"{checkpoint.name} is not used: {wrong}. What was done after the one before is done again.")
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
