"""Data-loading workers: torch's DataLoader, signals, and how many workers to start."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from vit_scale.config import DataConfig
from vit_scale.data.batch import ImageSource
from vit_scale.data.images.unreadable import Problems
from vit_scale.data.loading.batches import WorkerBatch
from vit_scale.data.loading.slots import PREFETCH
from vit_scale.data.sources.streams import StreamSource
from vit_scale.errors import UserError
from vit_scale.kernels.forked_memory import release_inherited_memory
from vit_scale.kernels.malloc import retain_freed_memory

_SMALL_IMAGE_BYTES = 8192
_MAX_WORKERS = 16


def choose_workers(config: DataConfig, cores: int, source: ImageSource) -> int:
    """Return the workers of a training process: the option, otherwise by its `cores` and the cost of an image.

    Without a GPU training itself needs the cores: small images are loaded in between, large ones by a few workers.
    """
    if config.workers != "auto":
        return config.workers
    small = not isinstance(source, StreamSource) and _is_small(source)
    if torch.cuda.is_available():
        return min(cores, 4 if small else _MAX_WORKERS)
    return 0 if small else max(1, cores // 4)


def _is_small(source: ImageSource) -> bool:
    image = source.read(0).image
    if isinstance(image, str):
        return os.path.getsize(image) < _SMALL_IMAGE_BYTES
    return memoryview(image).nbytes < _SMALL_IMAGE_BYTES


@dataclass(frozen=True)
class _Numbered:
    """Indices with the numbers of their batches."""

    indices: Any

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return enumerate(self.indices)


class Workers:
    """A DataLoader of complete batches that turns its failures into UserErrors."""

    def __init__(self, batches: Dataset[WorkerBatch], indices: Any, workers: int):
        """`indices`: what each batch is built from; None for a stream, which needs none."""
        self.problems = Problems()
        self._closing = torch.zeros(1, dtype=torch.bool).share_memory_()
        # If no caller closes the loader, Python ends the workers by a signal and then waits for them.
        atexit.register(self._closing.fill_, True)
        self._loader = DataLoader(
            batches,
            sampler=None if indices is None else _Numbered(indices),
            batch_size=None,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            prefetch_factor=PREFETCH if workers else None,
            persistent_workers=workers > 0,
            worker_init_fn=partial(_start_worker, self._closing),
        )
        self._running: Iterator[WorkerBatch] | None = None
        self._is_ahead = False

    def __len__(self) -> int:
        return len(self._loader)

    def start(self) -> None:
        """Start the workers; calling it again has no effect."""
        if not self._is_ahead:
            self._running, self._is_ahead = iter(self._loader), True

    def __iter__(self) -> Iterator[WorkerBatch]:
        self.start()
        self._is_ahead = False
        while True:
            batch = self._next()
            if batch is None:
                return
            yield batch

    def _next(self) -> WorkerBatch | None:
        if self._running is None:
            return None
        try:
            batch = next(self._running, None)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error) or "Caught" in str(error):
                raise
            self.close()
            raise UserError(
                f"A data-loading worker died: {error}\n"
                "If it ran out of memory, use fewer data.workers or a smaller batch.micro."
            ) from error
        if batch is not None:
            if batch.error is not None:
                self.close()
                raise UserError(batch.error)
            self.problems.add(batch.problems)
        return batch

    def close(self) -> None:
        """Stop the workers: they end with the DataLoader's iterator."""
        self._closing.fill_(True)
        atexit.unregister(self._closing.fill_)
        self._running = None
        self._loader._iterator = None


def _start_worker(closing: torch.Tensor, worker: int) -> None:
    """Called first in each worker."""
    release_inherited_memory()
    # Everything imported stays: otherwise the garbage collector would traverse it again and again, and each worker
    # would get its own copy of the pages.
    gc.freeze()
    gc.enable()  # It may be off while a run is built; objects of a worker soon become garbage.
    retain_freed_memory()
    _leave_signals_to_training(closing)


def _leave_signals_to_training(closing: torch.Tensor) -> None:
    """Ignore signals until closing: terminals and schedulers signal every process of a job, and the training process
    still needs batches to finish its step."""

    def receive(number: int, frame: FrameType | None) -> None:
        if closing.item():
            raise SystemExit

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, receive)
