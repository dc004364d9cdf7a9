"""Build micro-batches of a stream, in which images have no index: every worker takes what comes next."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from vit_scale.data.augment.geometry import Row
from vit_scale.data.augment.transforms import TrainTransform
from vit_scale.data.batch import Sample
from vit_scale.data.draws import keys, uniforms
from vit_scale.data.images.unreadable import Problem
from vit_scale.data.loading.batches import (
    MAX_SUBSTITUTES,
    BatchBuilder,
    Cropped,
    Reader,
    WorkerBatch,
    failed,
    too_many_unreadable,
)
from vit_scale.data.loading.slots import SlotRing
from vit_scale.data.sampling import EvalIndices, Ints, TrainIndices
from vit_scale.data.sources.streams import StreamSource
from vit_scale.errors import UserError


class StreamTrainBatches(IterableDataset[WorkerBatch]):
    """As many micro-batches as the steps need, whatever the number of images: streams restart when they end."""

    def __init__(
        self, source: StreamSource, reader: Reader, transform: TrainTransform, indices: TrainIndices, ring: SlotRing
    ):
        self.source, self.reader, self.transform, self.indices, self.ring = source, reader, transform, indices, ring

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[WorkerBatch]:
        # DataLoader takes batches from its workers in turn.
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        samples = enumerate(self._endless())
        try:
            for batch, positions in itertools.islice(enumerate(self.indices.positions()), first, None, step):
                yield self._build(batch, positions, samples)
        except UserError as error:
            yield failed(error)

    def _endless(self) -> Iterator[Sample]:
        indices = self.indices
        for epoch in itertools.count():
            seed = int(keys(indices.seed, epoch, stream=indices.start_step)[0] >> np.uint64(33))
            empty = True
            for sample in self.source.samples(indices.rank, indices.world, seed):
                empty = False
                yield sample
            if empty:
                raise UserError(f"data.streaming: {self.source.name} has no images for rank {indices.rank}")

    def _build(self, batch: int, positions: Ints, samples: Iterator[tuple[int, Sample]]) -> WorkerBatch:
        builder = BatchBuilder(self.ring, self.reader.target, batch, positions)
        for i, row in enumerate(uniforms(self.indices.seed, positions, self.transform.slots).tolist()):
            crop = self._next_readable(samples, row, builder.problems)
            builder.put_group(i, [crop], self.transform.change([crop.planes], [crop.geometry], [row]))
        return builder.finish()

    def _next_readable(self, samples: Iterator[tuple[int, Sample]], row: Row, problems: list[Problem]) -> Cropped:
        for number, sample in itertools.islice(samples, MAX_SUBSTITUTES):
            found = self.reader.read(sample, row, _problem_at(self.source, number))
            if not isinstance(found, Problem):
                return found
            problems.append(found)
        raise too_many_unreadable(problems[-1])


class StreamEvalBatches(IterableDataset[WorkerBatch]):
    """Each image once over all processes: each reads the full stream, and decodes only its own batches.

    So every process sees the end and knows, without communication, how many batches all of them have.
    """

    def __init__(self, source: StreamSource, reader: Reader, indices: EvalIndices, ring: SlotRing):
        self.source, self.reader, self.ring = source, reader, ring
        self.batch, self.rank, self.world = indices.batch, indices.rank, indices.world

    def __len__(self) -> int:
        if self.source.length is None:
            raise TypeError("the length of this stream is unknown")  # `list` handles this exception.
        return -(-self.source.length // (self.batch * self.world))

    def __iter__(self) -> Iterator[WorkerBatch]:
        samples = enumerate(self.source.samples(0, 1, None))
        try:
            for batch in itertools.count():
                all_ranks = list(itertools.islice(samples, self.batch * self.world))
                if not all_ranks:
                    return
                yield self._build(batch, all_ranks[self.rank * self.batch : (self.rank + 1) * self.batch])
        except UserError as error:
            yield failed(error)

    def _build(self, batch: int, samples: list[tuple[int, Sample]]) -> WorkerBatch:
        builder = BatchBuilder(self.ring, self.reader.target, batch, np.full(self.batch, -1))
        for i in range(self.batch):
            if i >= len(samples):
                builder.skip(i)
                continue
            number, sample = samples[i]
            found = self.reader.read(sample, (), _problem_at(self.source, number))
            if isinstance(found, Problem):
                builder.skip(i, found)
            else:
                builder.put(i, found.planes, found.target)
                builder.positions[i] = number
        return builder.finish()


def _problem_at(source: StreamSource, number: int) -> Callable[[str], Problem]:
    return lambda reason: Problem(number, source.describe(number), reason)
