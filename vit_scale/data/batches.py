"""Micro batches, made whole by whoever loads: read, decode, transform, straight into one block of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from vit_scale.data.decode import BrokenImage, open_picture
from vit_scale.data.draws import uniforms
from vit_scale.data.problems import Problem
from vit_scale.data.sample import ImageSource, Sample
from vit_scale.data.sampling import sample_index, step_positions
from vit_scale.data.transforms import EvalTransform, TrainTransform
from vit_scale.errors import UserError

Ints = npt.NDArray[np.int64]
Transform = TrainTransform | EvalTransform

SUBSTITUTES = 20
"""Broken images in a row after which `data.on_error: skip` gives up."""


@dataclass
class Made:
    """What comes back from a worker. Small arrays are pickled: a shared block for each would use up file handles."""

    images: torch.Tensor
    labels: Ints
    places: Ints
    """Global positions in training, indices (-1: padding) in evaluation."""
    problems: list[Problem]
    error: str | None = None
    """Message of a UserError; as an exception it would arrive with the worker's traceback."""

    def pin_memory(self) -> Made:
        """Called by DataLoader in a thread of the training process, where there is a GPU."""
        self.images = self.images.pin_memory()
        return self


@dataclass(frozen=True)
class TrainPlaces:
    """Positions and images of each micro batch of this process, in order. Drawn in one place, not in every worker."""

    global_batch: int
    micro_batch: int
    rank: int
    world: int
    start_step: int
    end_step: int
    seed: int
    images: int
    repeats: int

    def __len__(self) -> int:
        return (self.end_step - self.start_step) * (self.global_batch // self.world // self.micro_batch)

    def __iter__(self) -> Iterator[tuple[Ints, Ints]]:
        for positions in self.positions():
            yield positions, sample_index(self.seed, positions, self.images, self.repeats)

    def positions(self) -> Iterator[Ints]:
        """Global positions of each micro batch."""
        for step in range(self.start_step, self.end_step):
            yield from step_positions(step, self.global_batch, self.rank, self.world, self.micro_batch)


@dataclass(frozen=True)
class Reader:
    """Opens and transforms images, and decides about broken ones."""

    channels: int
    on_error: str

    def make(
        self, sample: Sample, transform: Transform, row: list[float], problem: Callable[[str], Problem]
    ) -> npt.NDArray[np.uint8] | Problem:
        """Planes of the transformed image, or the problem if it is broken and may be skipped."""
        try:
            return transform(open_picture(sample.image, self.channels), row)
        except BrokenImage as error:
            found = problem(str(error))
            if self.on_error == "raise":
                raise UserError(f"{found.name}: {found.reason}; data.on_error=skip leaves such images out") from error
            return found


class Batches(Dataset[Made]):
    """Micro batches by their places, made whole in a worker."""

    def __getitem__(self, places: Any) -> Made:
        try:
            return self.make(places)
        except UserError as error:
            return failed(error)

    def make(self, places: Any) -> Made:
        raise NotImplementedError


class TrainBatches(Batches):
    """Training batches of a source: places are (positions, indices)."""

    def __init__(self, source: ImageSource, reader: Reader, transform: TrainTransform, seed: int):
        self.source, self.reader, self.transform, self.seed = source, reader, transform, seed

    def make(self, places: tuple[Ints, Ints]) -> Made:
        positions, indices = places
        images = shared_images(len(positions), self.reader.channels, self.transform.size)
        out, labels = images.numpy(), np.empty(len(positions), np.int64)
        problems: list[Problem] = []
        rows = uniforms(self.seed, positions, self.transform.slots).tolist()
        for i, (index, row) in enumerate(zip(indices.tolist(), rows, strict=True)):
            out[i], labels[i] = self._make_or_substitute(index, row, problems)
        return Made(images, labels, positions, problems)

    def _make_or_substitute(self, index: int, row: list[float], problems: list[Problem]) -> tuple[Any, int]:
        """The image, or the next one that is not broken."""
        for i in range(SUBSTITUTES):
            substitute = (index + i) % len(self.source)
            sample = self.source.read(substitute)
            made = self.reader.make(sample, self.transform, row, _problem_at(self.source, substitute))
            if not isinstance(made, Problem):
                return made, sample.label
            problems.append(made)
        raise too_many_broken(problems[-1])


class EvalBatches(Batches):
    """Evaluation batches of a source: places are indices, -1 for padding."""

    def __init__(self, source: ImageSource, reader: Reader, transform: EvalTransform):
        self.source, self.reader, self.transform = source, reader, transform

    def make(self, places: Ints) -> Made:
        images = shared_images(len(places), self.reader.channels, self.transform.size)
        images.zero_()
        out, labels, counted = images.numpy(), np.zeros(len(places), np.int64), places.copy()
        problems: list[Problem] = []
        for i, index in enumerate(places.tolist()):
            if index < 0:
                continue
            sample = self.source.read(index)
            made = self.reader.make(sample, self.transform, [], _problem_at(self.source, index))
            if isinstance(made, Problem):
                problems.append(made)
                counted[i] = -1
            else:
                out[i], labels[i] = made, sample.label
        return Made(images, labels, counted, problems)


def failed(error: UserError) -> Made:
    """What a worker hands back instead of a batch."""
    nothing = np.empty(0, np.int64)
    return Made(torch.empty(0), nothing, nothing, [], str(error))


def _problem_at(source: ImageSource, index: int) -> Callable[[str], Problem]:
    return lambda reason: Problem(index, source.describe(index), reason)


def too_many_broken(last: Problem) -> UserError:
    """For when skipping leads nowhere."""
    return UserError(f"{SUBSTITUTES} images in a row are broken; the last is {last.name}: {last.reason}")


def shared_images(count: int, channels: int, size: tuple[int, int]) -> torch.Tensor:
    """Memory for a batch; in a worker shared memory, as torch's own collation does, so that nothing is copied again."""
    shape = (count, channels, *size)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(count * channels * size[0] * size[1])
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
