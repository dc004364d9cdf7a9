"""Batches for training and evaluation, made by worker processes.

A worker makes whole micro batches: it reads, decodes and augments straight into one block of shared memory, and the
training process only maps it. torch's DataLoader starts the workers once, keeps their batches in order and notices
their death.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.augment.transforms import EvalTransform, TrainTransform
from vit_scale.data.batch import Batch, ImageSource
from vit_scale.data.images.unreadable import Problems
from vit_scale.data.loading.batches import EvalBatches, Made, Reader, TrainBatches, TrainPlaces
from vit_scale.data.loading.slots import PREFETCH, SlotRing
from vit_scale.data.loading.stream_batches import StreamEvalBatches, StreamTrainBatches
from vit_scale.data.sampling import eval_places
from vit_scale.data.sources.streams import StreamSource
from vit_scale.errors import UserError
from vit_scale.kernels.malloc import retain_freed_memory

_SMALL_IMAGE_BYTES = 8192
_MAX_WORKERS = 16


class TrainLoader:
    """This process's micro batches from `start_step` to `end_step`, over all epochs in one pass.

    Which images, and all random choices about them, follow from the seed and their global positions alone.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        augment: AugmentConfig,
        img_size: tuple[int, int],
        in_chans: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world: int,
        seed: int,
        workers: int,
        end_step: int,
        start_step: int = 0,
        on_error: str = "raise",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        held: int | None = None,
    ):
        """`mean` and `std` are the normalisation's: what RandAugment fills with and erasing's noise looks like.

        `held`: the batches that the caller uses at a time, the newest included; older ones may change under its hands.
        None: all stay what they are, for which each is copied.
        """
        self.problems = Problems()
        self._held = held
        transform = TrainTransform(augment, img_size, mean or (0.5,) * in_chans, std or (0.25,) * in_chans)
        reader = Reader(in_chans, on_error)
        images = 0 if isinstance(source, StreamSource) else len(source)
        places = TrainPlaces(
            global_batch, micro_batch, rank, world, start_step, end_step, seed, images, augment.repeats
        )
        if isinstance(source, StreamSource):
            workers = min(workers, source.shards(world))
        ring = SlotRing(workers, (micro_batch, in_chans, *img_size))
        if isinstance(source, StreamSource):
            stream = StreamTrainBatches(source, reader, transform, places, ring)
            self._workers = _Workers(stream, None, workers, self.problems)
        else:
            batches = TrainBatches(source, reader, transform, seed, ring)
            self._workers = _Workers(batches, places, workers, self.problems)

    def __len__(self) -> int:
        return len(self._workers)

    def start(self) -> None:
        """Begin to load, before the first batch is asked for."""
        self._workers.start()

    def __iter__(self) -> Iterator[Batch]:
        for made in self._workers:
            label = {"label": torch.from_numpy(made.labels)}
            yield Batch(made.take_images(self._held), label, torch.from_numpy(made.places))

    def close(self) -> None:
        """Stop the workers."""
        self._workers.close()


class EvalLoader:
    """Each image exactly once over all processes, as (images uint8, labels, weights).

    Every process has equally many full batches; what is missing at the end is padded with weight 0. An image that
    `data.on_error: skip` leaves out has weight 0, too.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        augment: AugmentConfig,
        img_size: tuple[int, int],
        in_chans: int,
        batch: int,
        rank: int,
        world: int,
        workers: int,
        on_error: str = "raise",
    ):
        self.problems = Problems()
        reader, transform = Reader(in_chans, on_error), EvalTransform(augment, img_size)
        if isinstance(source, StreamSource):
            workers = min(workers, 1)
        ring = SlotRing(workers, (batch, in_chans, *img_size))
        if isinstance(source, StreamSource):
            stream = StreamEvalBatches(source, reader, transform, rank, world, ring)
            self._workers = _Workers(stream, None, workers, self.problems)
        else:
            places = eval_places(len(source), batch, rank, world)
            self._workers = _Workers(EvalBatches(source, reader, transform, ring), places, workers, self.problems)

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Batch]:
        for made in self._workers:
            yield Batch(made.take_images(), {"label": torch.from_numpy(made.labels)}, torch.from_numpy(made.places))

    def close(self) -> None:
        """Stop the workers."""
        self._workers.close()


def choose_workers(config: DataConfig, processes_on_this_machine: int, source: ImageSource) -> int:
    """Workers for each training process: the option, else by cores and by how costly an image is.

    Without a GPU training itself needs the cores: small images are loaded in between, large ones by a few workers.
    """
    if config.workers != "auto":
        return config.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // processes_on_this_machine)
    small = not isinstance(source, StreamSource) and _is_small(source)
    if torch.cuda.is_available():
        return min(share, 4 if small else _MAX_WORKERS)
    return 0 if small else max(1, share // 4)


def _is_small(source: ImageSource) -> bool:
    image = source.read(0).image
    if isinstance(image, str):
        return os.path.getsize(image) < _SMALL_IMAGE_BYTES
    return memoryview(image).nbytes < _SMALL_IMAGE_BYTES


@dataclass(frozen=True)
class _Numbered:
    """Places with the numbers of their batches."""

    places: Any

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return enumerate(self.places)


class _Workers:
    """A DataLoader of whole batches that turns its troubles into UserErrors."""

    def __init__(self, batches: Dataset[Made], places: Any, workers: int, problems: Problems):
        self.problems = problems
        self._closing = torch.zeros(1, dtype=torch.bool).share_memory_()
        # A loader that nobody closed: Python ends the workers by a signal and then waits for them.
        atexit.register(self._closing.fill_, True)
        self._loader = DataLoader(
            batches,
            sampler=None if places is None else _Numbered(places),
            batch_size=None,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            prefetch_factor=PREFETCH if workers else None,
            persistent_workers=workers > 0,
            worker_init_fn=partial(_start_worker, self._closing),
        )
        self._running: Iterator[Made] | None = None
        self._is_ahead = False

    def __len__(self) -> int:
        return len(self._loader)

    def start(self) -> None:
        """Let the workers begin; once more changes nothing."""
        if not self._is_ahead:
            self._running, self._is_ahead = iter(self._loader), True

    def __iter__(self) -> Iterator[Made]:
        self.start()
        self._is_ahead = False
        while True:
            made = self._next()
            if made is None:
                return
            yield made

    def _next(self) -> Made | None:
        if self._running is None:
            return None
        try:
            made = next(self._running, None)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error) or "Caught" in str(error):
                raise
            self.close()
            raise UserError(
                f"A process that loads images died: {error}\n"
                "If memory ran out, use fewer data.workers or a smaller batch.micro."
            ) from error
        if made is not None:
            if made.error is not None:
                self.close()
                raise UserError(made.error)
            self.problems.add(made.problems)
        return made

    def close(self) -> None:
        """Stop the worker processes: they end with the DataLoader's iterator."""
        self._closing.fill_(True)
        atexit.unregister(self._closing.fill_)
        self._running = None
        self._loader._iterator = None


def _start_worker(closing: torch.Tensor, worker: int) -> None:
    """Called first in each worker."""
    # What was imported stays: otherwise the garbage collector goes through all of it again and again, and each worker
    # gets its own copy of the pages.
    gc.freeze()
    gc.enable()  # It may be off while a run is built; what a worker makes is garbage soon.
    retain_freed_memory()
    _leave_signals_to_training(closing)


def _leave_signals_to_training(closing: torch.Tensor) -> None:
    """Terminals and schedulers signal every process of a job; the one that trains still needs batches to end well."""

    def receive(number: int, frame: FrameType | None) -> None:
        if closing.item():
            raise SystemExit

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, receive)
