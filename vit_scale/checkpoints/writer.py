"""Saving checkpoints: whole or not there, and readable by any number of processes under any strategy.

    checkpoints/step-00001000/
      model.safetensors        weights and buffers, whole, in fp32, under timm's names
      shard-00000.safetensors  pieces of the optimiser's state and of the EMA that process 0 owns, and so on
      meta.json                step, best result, options of the run, versions, W&B id
      manifest.json            size and checksum of each file

Tensors are copied when `save` is called and written by a thread, so training does not wait for the disk. Each process
writes its shard; the main process waits for all of them, writes the manifest and renames the folder. `resume.py` reads
what is written here.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch

from vit_scale.checkpoints.checked_files import to_disk, write_json, write_tensors
from vit_scale.checkpoints.host_copies import HostCopies, Tensors
from vit_scale.files import describe_write_error
from vit_scale.strategies.shards import Pieces
from vit_scale.train.state import TrainState

Files = dict[str, tuple[Tensors, dict[str, str]]]
"""Names of safetensors files, with their tensors and metadata."""


class CheckpointFolder:
    """The `checkpoints/` of a run: saves in the background, keeps the newest few, the best and the last good one."""

    def __init__(
        self,
        run_folder: Path,
        *,
        keep: int,
        rank: int,
        world: int,
        session: str,
        step: int = 0,
        seconds_to_wait: float = 600.0,
    ) -> None:
        """`session` is a word that all processes of this start share and no earlier start had.

        `step` is where this start goes on from; `seconds_to_wait` is how long one process waits for another's shard.
        """
        self.path = run_folder / "checkpoints"
        self.keep, self.rank, self.world, self.session = keep, rank, world, session
        self._good_step = step
        self._seconds_to_wait = seconds_to_wait
        self._copies = HostCopies()
        self._problem: str | None = None
        self._abandoned = threading.Event()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        if rank == 0:
            self._remove_halves()
            self._put_later_ones_aside(step)

    def save(self, state: TrainState, meta: dict[str, Any]) -> None:
        """Copy `state` now and write it in the background; all processes must call it.

        A failure to write stops nothing; `problem()` tells of it.
        """
        self.wait()
        meta = numbers(state) | meta
        if not meta["bad_in_a_row"]:
            self._good_step = state.step
        weights = state.shards.state_dict()
        try:
            files = self._copy(state, weights)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter where host memory is short
            self._writing = self._writer.submit(self._fail, state.step, error, {})
        else:
            kept = {state.best_step, self._good_step}
            self._writing = self._writer.submit(self._write, state.step, files, meta, kept)

    @property
    def good(self) -> Path | None:
        """The newest checkpoint that was not saved amid skipped updates."""
        self.wait()
        path = self.path / folder_name(self._good_step)
        return path if path.exists() else None

    def problem(self) -> str | None:
        """What went wrong with a save since the last call."""
        problem, self._problem = self._problem, None
        return problem

    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Return when what was being written is written, or has failed."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        except Exception as error:  # noqa: BLE001 -- whatever it is, training goes on
            self._problem = f"{error}. Earlier checkpoints are whole."
        self._writing = None

    def abandon(self) -> None:
        """Wait no longer for the shards of other processes: one of them is lost."""
        self._abandoned.set()

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def _copy(self, state: TrainState, weights: Tensors) -> Files:
        tensors, metadata = _shard(state)
        files: Files = {f"shard-{self.rank:05d}.safetensors": (self._copies.take("shard", tensors), metadata)}
        if self.rank == 0:
            files["model.safetensors"] = (self._copies.take("model", weights), {})
        return files

    # ---------------------------------------------------------------------------------------- in the writing thread

    def _write(self, step: int, files: Files, meta: dict[str, Any], kept: set[int]) -> None:
        try:
            partial = self._partial(step)
            partial.mkdir(parents=True, exist_ok=True)
            written = {name: write_tensors(partial / name, *content) for name, content in files.items()}
            if self.rank == 0:
                written["meta.json"] = write_json(partial / "meta.json", meta)
            self._leave_receipt(partial, {"files": written})
            if self.rank == 0:
                self._commit(partial, step)
                self._remove_halves(before=step)
                self._remove_old(kept)
        except Exception as error:
            self._fail(step, error, files)

    def _fail(self, step: int, error: Exception, files: Files) -> NoReturn:
        """Free the room that was taken, tell the main process, and raise."""
        partial = self._partial(step)
        sizes = {
            name: sum(t.numel() * t.element_size() for t in tensors.values()) for name, (tensors, _) in files.items()
        }
        message = str(error) if isinstance(error, _AnotherProcess) else describe_write_error(error, partial, sizes)
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                partial.mkdir(parents=True, exist_ok=True)
                for name in files:
                    (partial / name).unlink(missing_ok=True)
                self._leave_receipt(partial, {"error": f"process {self.rank}: {message}"})
        raise OSError(f"The checkpoint of step {step:,} could not be saved: {message}") from error

    def _leave_receipt(self, partial: Path, receipt: dict[str, Any]) -> None:
        """Tell the main process, through the folder, that this process has done its part."""
        waiting = partial / f".receipt-{self.rank:05d}"
        waiting.write_text(json.dumps(receipt))
        waiting.rename(partial / f"receipt-{self.rank:05d}.json")

    def _commit(self, partial: Path, step: int) -> None:
        files: dict[str, Any] = {}
        deadline = time.monotonic() + self._seconds_to_wait
        for rank in range(self.world):
            receipt = partial / f"receipt-{rank:05d}.json"
            while not receipt.exists():
                if self._abandoned.wait(0.02) or time.monotonic() > deadline:
                    raise _AnotherProcess(f"process {rank} did not write its part; is {self.path} on a shared disk?")
            content = json.loads(receipt.read_text())
            if "error" in content:
                raise _AnotherProcess(content["error"])
            files |= content["files"]
            receipt.unlink()
        write_json(partial / "manifest.json", {"files": files})
        to_disk(partial)
        final = self.path / folder_name(step)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        to_disk(self.path)

    # -------------------------------------------------------------------------------------------------- housekeeping

    def _partial(self, step: int) -> Path:
        return self.path / f".partial-{step:08d}-{self.session}"

    def _remove_halves(self, before: int | None = None) -> None:
        """Remove what killed processes left half written; with `before`, what failed saves of this start left."""
        for half in self.path.glob(".partial-*"):
            ours = half.name.endswith(self.session)
            if not ours or (before is not None and half.name < self._partial(before).name):
                shutil.rmtree(half, ignore_errors=True)

    def _put_later_ones_aside(self, step: int) -> None:
        """Damaged, or left by going back on purpose: in place they would be taken for newer than what is saved next."""
        for later in list_checkpoints(self.path):
            if step_of(later) > step:
                aside = later.with_name(f"unused-{later.name}")
                shutil.rmtree(aside, ignore_errors=True)
                later.rename(aside)

    def _remove_old(self, kept: set[int]) -> None:
        for old in list_checkpoints(self.path)[: -self.keep]:
            if step_of(old) not in kept:
                shutil.rmtree(old, ignore_errors=True)


class _AnotherProcess(OSError):
    """The reason lies with another process, which has explained it."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, oldest first, whole or not."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=step_of)


def numbers(state: TrainState) -> dict[str, Any]:
    """The state that is not tensors."""
    return {
        "step": state.step,
        "best": state.best,
        "best_step": state.best_step,
        "bad_steps": int(state.bad_steps.item()),
        "bad_in_a_row": int(state.bad_in_a_row.item()),
        "loss_scale": state.loss_scale.numbers() if state.loss_scale else None,
    }


def _shard(state: TrainState) -> tuple[Tensors, dict[str, str]]:
    """What this process owns of optimiser and EMA, and where each piece starts."""
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
    return {key: piece.tensor for key, piece in pieces.items()} | tensors, metadata
