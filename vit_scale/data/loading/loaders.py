"""Batches for training and evaluation, built by data-loading workers.

A worker builds complete micro-batches: it reads, decodes and augments straight into one block of shared memory, and the
training process only maps it. torch's DataLoader starts the workers once, keeps their batches in order and detects
their death.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vit_scale.data.augment.transforms import EvalTransform, TrainTransform
from vit_scale.data.batch import Batch, ImageSource
from vit_scale.data.images.unreadable import Problems
from vit_scale.data.loading.batches import EvalBatches, Reader, TrainBatches
from vit_scale.data.loading.stream_batches import StreamEvalBatches, StreamTrainBatches
from vit_scale.data.loading.workers import Workers
from vit_scale.data.sampling import EvalIndices, TrainIndices
from vit_scale.data.sources.streams import StreamSource
from vit_scale.data.targets import Target, check_transform


@dataclass(frozen=True)
class Loading:
    """How images are loaded; what is loaded does not depend on it."""

    channels: int
    on_error: str = "raise"
    """`data.on_error`."""
    workers: int = 0
    """Worker processes; 0: load in the training process."""
    reserved_batches: int | None = None
    """Training batches that the caller uses at a time, including the latest; older ones may be overwritten. None: every
    batch is copied, and none is ever overwritten."""


class _Loader:
    """Iterates over batches; a stream is an iterable dataset, any other source is read by index."""

    def __init__(self, workers: Workers, reserved_batches: int | None = None):
        self._workers, self._reserved_batches = workers, reserved_batches

    @property
    def problems(self) -> Problems:
        """Images that could not be read so far."""
        return self._workers.problems

    def __len__(self) -> int:
        return len(self._workers)

    def count(self) -> int | None:
        """Return the number of batches; None for a stream of unknown length."""
        try:
            return len(self)
        except TypeError:
            return None

    def start(self) -> None:
        """Start loading before the first batch is requested."""
        self._workers.start()

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._workers:
            yield batch.to_batch(self._reserved_batches)

    def close(self) -> None:
        """Stop the workers."""
        self._workers.close()


class TrainLoader(_Loader):
    """The micro-batches of one process from the first step to the last, over all epochs in one pass.

    Images and all random choices about them are functions of the seed and the global positions alone.
    """

    def __init__(
        self, source: ImageSource, transform: TrainTransform, indices: TrainIndices, target: Target, loading: Loading
    ):
        check_transform(target, transform)
        reader = Reader(transform, target, loading.channels, loading.on_error)
        if isinstance(source, StreamSource):
            count = min(loading.workers, source.shards(indices.world))
            ring = reader.ring(count, indices.micro_batch)
            workers = Workers(StreamTrainBatches(source, reader, transform, indices, ring), None, count)
        else:
            ring = reader.ring(loading.workers, indices.micro_batch)
            batches = TrainBatches(source, reader, transform, indices.seed, ring)
            workers = Workers(batches, indices, loading.workers)
        super().__init__(workers, loading.reserved_batches)


class EvalLoader(_Loader):
    """Each image exactly once over all processes.

    Every process has the same number of full batches; the end is padded. Padding and images that `data.on_error: skip`
    skips have position -1.
    """

    def __init__(
        self, source: ImageSource, transform: EvalTransform, indices: EvalIndices, target: Target, loading: Loading
    ):
        reader = Reader(transform, target, loading.channels, loading.on_error)
        if isinstance(source, StreamSource):
            count = min(loading.workers, 1)
            ring = reader.ring(count, indices.batch)
            workers = Workers(StreamEvalBatches(source, reader, indices, ring), None, count)
        else:
            ring = reader.ring(loading.workers, indices.batch)
            workers = Workers(EvalBatches(source, reader, ring), indices, loading.workers)
        super().__init__(workers)
