"""Write checkpoints that are complete or absent, and readable by any number of ranks with any strategy.

    checkpoints/step-00001000/
      model.safetensors        full weights and buffers, in fp32, under timm's names
      shard-00000.safetensors  pieces of optimizer state and EMA that rank 0 owns, and so on
      meta.json                step, best result, options, versions, W&B id
      manifest.json            size and checksum of each file
      evaluation.json          metrics, once the evaluation after this step is done

`save` copies tensors and a thread writes them, so training does not wait for the disk. Each rank writes its shard;
rank 0 waits for all of them, writes the manifest and renames the directory. `find.py` and `reader.py` read it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch

from vit_scale.checkpoints.checked_files import flush_to_disk, write_json, write_tensors
from vit_scale.checkpoints.find import EVALUATION, checkpoint_name, list_checkpoints, step_of
from vit_scale.checkpoints.host_copies import HostCopies, Tensors
from vit_scale.checkpoints.pieces import Snapshot
from vit_scale.checkpoints.run_dir import unused_path
from vit_scale.files import describe_write_error, write_text

Files = dict[str, tuple[Tensors, dict[str, str]]]
"""Safetensors files by name: tensors and metadata."""


class CheckpointFolder:
    """The `checkpoints` directory of a run: saves in the background, keeps the latest, best and last good ones."""

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        rank: int,
        world: int,
        session: str,
        step: int = 0,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Open the directory and remove what failed saves of earlier launches left.

        Args:
            keep: latest checkpoints to keep.
            session: a word that all ranks of this launch share and no earlier launch used.
            step: the step that this launch resumes from.
            timeout_seconds: how long rank 0 waits for the shard of another rank.
        """
        self.path = run_dir / "checkpoints"
        self.keep, self.rank, self.world, self.session = keep, rank, world, session
        self._good_step = step
        self._timeout_seconds = timeout_seconds
        self._copies = HostCopies()
        self._problem: str | None = None
        self._abandoned = threading.Event()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        if rank == 0:
            self._remove_partial()
            self._rename_later_checkpoints(step)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the copies in host memory that checkpoints are written from."""
        return self._copies.tensors()

    def save(self, snapshot: Snapshot, meta: dict[str, Any]) -> None:
        """Copy `snapshot` now and write it in the background; all ranks must call it.

        A failed write does not stop training; `problem()` reports it.
        """
        self.wait()
        meta = snapshot.numbers() | meta
        if not meta["consecutive_skipped_steps"]:
            self._good_step = snapshot.step
        try:
            files = self._copy(snapshot)
        except MemoryError as error:
            self._writing = self._writer.submit(self._fail, snapshot.step, error, {})
        else:
            kept = {snapshot.best_step, self._good_step}
            self._writing = self._writer.submit(self._write, snapshot.step, files, meta, kept)

    def add_evaluation(self, snapshot: Snapshot, metrics: dict[str, float]) -> None:
        """Add the evaluation of `snapshot` to its checkpoint, in the background, and remove a former best one."""
        numbers = snapshot.numbers()
        evaluation = {"best": numbers["best"], "best_step": numbers["best_step"], "metrics": metrics}
        if self.rank == 0:
            self._writer.submit(self._add_evaluation, snapshot.step, evaluation, {snapshot.best_step, self._good_step})

    @property
    def good(self) -> Path | None:
        """The latest checkpoint that was not saved between skipped steps."""
        self.wait()
        path = self.path / checkpoint_name(self._good_step)
        return path if path.exists() else None

    def problem(self) -> str | None:
        """Return the error of a save since the last call, if any."""
        problem, self._problem = self._problem, None
        return problem

    def is_writing(self) -> bool:
        """Return whether a save is in progress."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Return when the save in progress has completed or failed."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        except Exception as error:  # noqa: BLE001 -- no failure to save stops training
            self._problem = f"{error}. Earlier checkpoints are intact."
        self._writing = None

    def abandon(self) -> None:
        """Stop waiting for the shards of other ranks: one of them has failed."""
        self._abandoned.set()

    def close(self) -> None:
        """Wait for the save in progress and stop the thread."""
        self.wait()
        self._writer.shutdown()

    def _copy(self, snapshot: Snapshot) -> Files:
        weights = self._copies.take("model", snapshot.whole())  # first: all ranks take part in it
        tensors, metadata = _shard(snapshot)
        files: Files = {f"shard-{self.rank:05d}.safetensors": (self._copies.take("shard", tensors.items()), metadata)}
        if self.rank == 0:
            files["model.safetensors"] = (weights, {})
        return files

    # ---------------------------------------------------------------------------------------- in the writer thread

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
                self._remove_partial(before=step)
                self._remove_old(kept)
        except Exception as error:
            self._fail(step, error, files)

    def _add_evaluation(self, step: int, evaluation: dict[str, Any], kept: set[int]) -> None:
        checkpoint = self.path / checkpoint_name(step)
        if checkpoint.is_dir():
            with contextlib.suppress(OSError):  # Without it, the evaluation is repeated on resume.
                write_text(checkpoint / EVALUATION, json.dumps(evaluation))
        self._remove_old(kept)

    def _fail(self, step: int, error: Exception, files: Files) -> NoReturn:
        """Free the disk space, notify rank 0, and raise."""
        partial = self._partial(step)
        sizes = {
            name: sum(t.numel() * t.element_size() for t in tensors.values()) for name, (tensors, _) in files.items()
        }
        message = str(error) if isinstance(error, _OtherRankError) else describe_write_error(error, partial, sizes)
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                partial.mkdir(parents=True, exist_ok=True)
                for name in files:
                    (partial / name).unlink(missing_ok=True)
                self._leave_receipt(partial, {"error": f"rank {self.rank}: {message}"})
        raise OSError(f"Checkpoint of step {step:,} could not be saved: {message}") from error

    def _leave_receipt(self, partial: Path, receipt: dict[str, Any]) -> None:
        """Notify rank 0, through the directory, that this rank has written its shard."""
        waiting = partial / f".receipt-{self.rank:05d}"
        waiting.write_text(json.dumps(receipt))
        waiting.rename(partial / f"receipt-{self.rank:05d}.json")

    def _commit(self, partial: Path, step: int) -> None:
        files: dict[str, Any] = {}
        deadline = time.monotonic() + self._timeout_seconds
        for rank in range(self.world):
            receipt = partial / f"receipt-{rank:05d}.json"
            while not receipt.exists():
                if self._abandoned.wait(0.02) or time.monotonic() > deadline:
                    raise _OtherRankError(f"rank {rank} did not write its shard; is {self.path} on a shared disk?")
            content = json.loads(receipt.read_text())
            if "error" in content:
                raise _OtherRankError(content["error"])
            files |= content["files"]
            receipt.unlink()
        write_json(partial / "manifest.json", {"files": files})
        flush_to_disk(partial)
        final = self.path / checkpoint_name(step)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        flush_to_disk(self.path)

    # -------------------------------------------------------------------------------------------------- housekeeping

    def _partial(self, step: int) -> Path:
        return self.path / f".partial-{step:08d}-{self.session}"

    def _remove_partial(self, before: int | None = None) -> None:
        """Remove partial checkpoints of killed processes; with `before`, also those of failed saves of this launch."""
        for partial in self.path.glob(".partial-*"):
            ours = partial.name.endswith(self.session)
            if not ours or (before is not None and partial.name < self._partial(before).name):
                shutil.rmtree(partial, ignore_errors=True)

    def _rename_later_checkpoints(self, step: int) -> None:
        """Rename corrupt checkpoints and those of an abandoned future: they would count as later than the next save."""
        for later in list_checkpoints(self.path):
            if step_of(later) > step:
                later.rename(unused_path(later))

    def _remove_old(self, kept: set[int]) -> None:
        for old in list_checkpoints(self.path)[: -self.keep]:
            if step_of(old) not in kept:
                shutil.rmtree(old, ignore_errors=True)


class _OtherRankError(OSError):
    """Another rank failed; the message is that rank's."""


def _shard(snapshot: Snapshot) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors of this rank's shard, and the start of each piece and all plain numbers as metadata."""
    pieces, scalars = snapshot.owned_pieces(), snapshot.scalars()
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
