"""Micro batches, made whole by whoever loads: read, decode, transform, straight into one block of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from vit_scale.data.augment.color_ops import Planes
from vit_scale.data.augment.transforms import EvalTransform, TrainTransform
from vit_scale.data.batch import ImageSource, Sample
from vit_scale.data.draws import uniforms
from vit_scale.data.images.decode import BrokenImage, Picture, open_picture
from vit_scale.data.images.unreadable import Problem
from vit_scale.data.loading.slots import SlotRing, find_ring
from vit_scale.data.sampling import sample_index, step_positions
from vit_scale.errors import UserError

Ints = npt.NDArray[np.int64]
MakePlanes = Callable[[Picture, list[float]], Planes]

SUBSTITUTES = 20
"""Broken images in a row after which `data.on_error: skip` gives up."""
_PIXELS_AT_A_TIME = 64 * 64 * 64
"""So many are opened before any is cropped: hundreds of icons, a photograph or two. More would only take memory."""


@dataclass
class Made:
    """What comes back from a worker: the images stay in shared memory, all else is small."""

    batch: int
    """Number of the batch."""
    ring: int
    """Number of the ring of slots that the images are in."""
    labels: Ints
    places: Ints
    """Global positions in training, indices (-1: padding) in evaluation."""
    problems: list[Problem]
    images: torch.Tensor | None = None
    """uint8 [m, C, H, W], where they are not in a shared slot."""
    error: str | None = None
    """Message of a UserError; as an exception it would arrive with the worker's traceback."""

    def take_images(self, held: int | None = None) -> torch.Tensor:
        """The images. Only in the training process, before the next batch is asked for.

        They are copied out of their slot, unless no more than `held` batches are in use at a time and that many stay.
        """
        if self.images is not None:
            return self.images
        ring = find_ring(self.ring)
        block = ring.block(self.batch)
        return block if held is not None and held <= ring.stays else block.clone()

    def pin_memory(self) -> Made:
        """The same into pinned memory; DataLoader calls this in a thread where there is a GPU."""
        if self.error is None:
            images = find_ring(self.ring).block(self.batch) if self.images is None else self.images
            self.images = images.pin_memory()
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
        self, sample: Sample, transform: MakePlanes, row: list[float], problem: Callable[[str], Problem]
    ) -> Planes | Problem:
        """Planes of the transformed image, or the problem if it is broken and may be skipped."""
        try:
            return transform(open_picture(sample.image, self.channels), row)
        except BrokenImage as error:
            found = problem(str(error))
            if self.on_error == "raise":
                raise UserError(f"{found.name}: {found.reason}; data.on_error=skip leaves such images out") from error
            return found


class Opened(NamedTuple):
    """An image between opening and cropping."""

    at: int
    """Its index in the source."""
    label: int
    picture: Picture | None
    """None: broken."""

    @property
    def pixels(self) -> int:
        """Height times width."""
        return 0 if self.picture is None else self.picture.height * self.picture.width


class Batches(Dataset[Made]):
    """Micro batches by their number and places, made whole in a worker."""

    def __init__(self, ring: SlotRing):
        self.ring = ring

    def __getitem__(self, item: tuple[int, Any]) -> Made:
        batch, places = item
        try:
            return self.make(batch, places)
        except UserError as error:
            return failed(error)

    def make(self, batch: int, places: Any) -> Made:
        """The batch of this number, of what stands at these places."""
        raise NotImplementedError


class TrainBatches(Batches):
    """Training batches of a source: places are (positions, indices)."""

    def __init__(self, source: ImageSource, reader: Reader, transform: TrainTransform, seed: int, ring: SlotRing):
        super().__init__(ring)
        self.source, self.reader, self.transform, self.seed = source, reader, transform, seed

    def make(self, batch: int, places: tuple[Ints, Ints]) -> Made:
        """The batch of the images with these indices, augmented for these positions.

        Of small images many are opened, then all of them cropped, then all flipped, and so on: at 32 pixels that takes
        little more than half as long as all steps of one image, then all of the next.
        """
        positions, indices = places
        draft = Draft(self.ring, batch, positions)
        rows = uniforms(self.seed, positions, self.transform.slots).tolist()
        done = 0
        for some in self._open_some(indices.tolist()):
            their_rows = rows[done : done + len(some)]
            crops = [self._crop(opened, row, draft.problems) for opened, row in zip(some, their_rows, strict=True)]
            planes = self.transform.change([crop for crop, _ in crops], their_rows)
            for x, (_, label) in zip(planes, crops, strict=True):
                draft.put(done, x, label)
                done += 1
        return draft.finish()

    def _open_some(self, indices: list[int]) -> Iterator[list[Opened]]:
        """The images at these indices, opened; of large ones few at a time."""
        some: list[Opened] = []
        pixels = 0
        for index in indices:
            some.append(opened := self._open(index))
            pixels += max(opened.pixels, self.transform.size[0] * self.transform.size[1])
            if pixels >= _PIXELS_AT_A_TIME:
                yield some
                some, pixels = [], 0
        if some:
            yield some

    def _open(self, index: int) -> Opened:
        sample = self.source.read(index)
        try:
            return Opened(index, sample.label, open_picture(sample.image, self.reader.channels))
        except BrokenImage:
            return Opened(index, sample.label, None)

    def _crop(self, opened: Opened, row: list[float], problems: list[Problem]) -> tuple[Planes, int]:
        """Crop and label of the image, or of the next one that is not broken."""
        if opened.picture is not None:
            try:
                return self.transform.crop(opened.picture, row), opened.label
            except BrokenImage:
                pass  # It is met again below, where it is named and counted.
        return self._crop_or_substitute(opened.at, row, problems)

    def _crop_or_substitute(self, index: int, row: list[float], problems: list[Problem]) -> tuple[Planes, int]:
        for i in range(SUBSTITUTES):
            substitute = (index + i) % len(self.source)
            sample = self.source.read(substitute)
            made = self.reader.make(sample, self.transform.crop, row, _problem_at(self.source, substitute))
            if not isinstance(made, Problem):
                return made, sample.label
            problems.append(made)
        raise too_many_broken(problems[-1])


class EvalBatches(Batches):
    """Evaluation batches of a source: places are indices, -1 for padding."""

    def __init__(self, source: ImageSource, reader: Reader, transform: EvalTransform, ring: SlotRing):
        super().__init__(ring)
        self.source, self.reader, self.transform = source, reader, transform

    def make(self, batch: int, places: Ints) -> Made:
        """The batch of these images; the places of broken ones become -1."""
        draft = Draft(self.ring, batch, places.copy())
        for i, index in enumerate(places.tolist()):
            if index < 0:
                draft.leave_out(i)
                continue
            sample = self.source.read(index)
            made = self.reader.make(sample, self.transform, [], _problem_at(self.source, index))
            if isinstance(made, Problem):
                draft.leave_out(i, made)
            else:
                draft.put(i, made, sample.label)
        return draft.finish()


class Draft:
    """A batch that is being made, in its slot."""

    def __init__(self, ring: SlotRing, batch: int, places: Ints):
        self.ring, self.batch, self.places = ring, batch, places
        self.images = ring.block(batch)
        self.labels = np.zeros(len(places), np.int64)
        self.problems: list[Problem] = []
        self._pixels = self.images.numpy()

    def put(self, i: int, planes: Planes, label: int) -> None:
        """Image `i` of the batch."""
        self._pixels[i] = planes
        self.labels[i] = label

    def leave_out(self, i: int, problem: Problem | None = None) -> None:
        """No image at `i`: black, and not counted."""
        self._pixels[i] = 0
        self.places[i] = -1
        if problem is not None:
            self.problems.append(problem)

    def finish(self) -> Made:
        """What is handed over."""
        images = None if self.ring.is_shared else self.images
        return Made(self.batch, self.ring.number, self.labels, self.places, self.problems, images)


def failed(error: UserError) -> Made:
    """What a worker hands back instead of a batch."""
    nothing = np.empty(0, np.int64)
    return Made(-1, -1, nothing, nothing, [], error=str(error))


def _problem_at(source: ImageSource, index: int) -> Callable[[str], Problem]:
    return lambda reason: Problem(index, source.describe(index), reason)


def too_many_broken(last: Problem) -> UserError:
    """For when skipping leads nowhere."""
    return UserError(f"{SUBSTITUTES} images in a row are broken; the last is {last.name}: {last.reason}")
