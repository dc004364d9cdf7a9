"""Micro batches of a stream, in which images have no index: whoever loads takes what comes next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

from vit_scale.data.augment.color_ops import Planes
from vit_scale.data.augment.transforms import EvalTransform, TrainTransform
from vit_scale.data.batch import Sample
from vit_scale.data.draws import keys, uniforms
from vit_scale.data.images.unreadable import Problem
from vit_scale.data.loading.batches import SUBSTITUTES, Draft, Made, Reader, TrainPlaces, failed, too_many_broken
from vit_scale.data.loading.slots import SlotRing
from vit_scale.data.sources.streams import StreamSource
from vit_scale.errors import UserError

Ints = npt.NDArray[np.int64]


class StreamTrainBatches(IterableDataset[Made]):
    """As many micro batches as the steps need, whatever the number of images: streams start again when they end."""

    def __init__(
        self, source: StreamSource, reader: Reader, transform: TrainTransform, places: TrainPlaces, ring: SlotRing
    ):
        self.source, self.reader, self.transform, self.places, self.ring = source, reader, transform, places, ring

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Made]:
        # DataLoader takes batches from its workers in turn.
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        samples = enumerate(self._endless())
        try:
            for batch, positions in itertools.islice(enumerate(self.places.positions()), first, None, step):
                yield self._make(batch, positions, samples)
        except UserError as error:
            yield failed(error)

    def _endless(self) -> Iterator[Sample]:
        places = self.places
        for epoch in itertools.count():
            seed = int(keys(places.seed, epoch, stream=places.start_step)[0] >> np.uint64(33))
            empty = True
            for sample in self.source.samples(places.rank, places.world, seed):
                empty = False
                yield sample
            if empty:
                raise UserError(f"data.streaming: {self.source.name} gave no image to process {places.rank}")

    def _make(self, batch: int, positions: Ints, samples: Iterator[tuple[int, Sample]]) -> Made:
        draft = Draft(self.ring, batch, positions)
        for i, row in enumerate(uniforms(self.places.seed, positions, self.transform.slots).tolist()):
            draft.put(i, *self._next_good(samples, row, draft.problems))
        return draft.finish()

    def _next_good(
        self, samples: Iterator[tuple[int, Sample]], row: list[float], problems: list[Problem]
    ) -> tuple[Planes, int]:
        for number, sample in itertools.islice(samples, SUBSTITUTES):
            made = self.reader.make(sample, self.transform, row, _problem_at(self.source, number))
            if not isinstance(made, Problem):
                return made, sample.label
            problems.append(made)
        raise too_many_broken(problems[-1])


class StreamEvalBatches(IterableDataset[Made]):
    """Each image once over all processes: each reads the whole stream, and decodes only its own batches.

    So every process sees the end and knows, without asking the others, how many batches all of them have.
    """

    def __init__(
        self, source: StreamSource, reader: Reader, transform: EvalTransform, rank: int, world: int, ring: SlotRing
    ):
        self.source, self.reader, self.transform, self.ring = source, reader, transform, ring
        self.batch, self.rank, self.world = ring.shape[0], rank, world

    def __len__(self) -> int:
        if self.source.length is None:
            raise TypeError("a stream that does not say how many images it has")  # `list` understands this one.
        return -(-self.source.length // (self.batch * self.world))

    def __iter__(self) -> Iterator[Made]:
        samples = enumerate(self.source.samples(0, 1, None))
        try:
            for batch in itertools.count():
                all_of_round = list(itertools.islice(samples, self.batch * self.world))
                if not all_of_round:
                    return
                yield self._make(batch, all_of_round[self.rank * self.batch : (self.rank + 1) * self.batch])
        except UserError as error:
            yield failed(error)

    def _make(self, batch: int, samples: list[tuple[int, Sample]]) -> Made:
        draft = Draft(self.ring, batch, np.full(self.batch, -1))
        for i in range(self.batch):
            if i >= len(samples):
                draft.leave_out(i)
                continue
            number, sample = samples[i]
            made = self.reader.make(sample, self.transform, [], _problem_at(self.source, number))
            if isinstance(made, Problem):
                draft.leave_out(i, made)
            else:
                draft.put(i, made, sample.label)
                draft.places[i] = number
        return draft.finish()


def _problem_at(source: StreamSource, number: int) -> Any:
    return lambda reason: Problem(number, source.describe(number), reason)
