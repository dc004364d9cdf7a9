"""Build complete micro-batches in one process: read, decode and transform straight into one block of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from vit_scale import gpu
from vit_scale.data.augment.color_ops import Planes
from vit_scale.data.augment.geometry import Geometry, Row
from vit_scale.data.augment.transforms import EvalTransform, TrainTransform
from vit_scale.data.batch import Batch, ImageSource, Sample
from vit_scale.data.draws import uniforms
from vit_scale.data.images.decode import LazyImage, UnreadableImage, open_image
from vit_scale.data.images.unreadable import Problem
from vit_scale.data.loading.slots import Blocks, BlockSpec, SlotRing, find_ring
from vit_scale.data.sampling import Ints
from vit_scale.data.targets import Target
from vit_scale.errors import UserError

MAX_SUBSTITUTES = 20
"""Consecutive unreadable images after which `data.on_error: skip` gives up."""
_OPEN_PIXELS = 64 * 64 * 64
"""Pixels opened before any is cropped: hundreds of icons, a photograph or two. More would only take memory."""


@dataclass
class WorkerBatch:
    """The result of a worker: images and masks stay in shared memory, everything else is small."""

    batch: int
    """Number of the batch."""
    ring: int
    """Number of the ring whose slot has the blocks."""
    positions: Ints | torch.Tensor
    """Global positions in training, image indices in evaluation, -1 for padding."""
    problems: list[Problem]
    target: dict[str, Any] = field(default_factory=dict)
    """Arrays that are not in a slot; pinned tensors if a GPU is available."""
    texts: list[list[str]] = field(default_factory=list)
    blocks: Blocks | None = None
    """Images and fixed-size targets, if they are not in a shared slot."""
    error: str | None = None
    """Message of a UserError; as an exception it would arrive with the worker's traceback."""

    def to_batch(self, reserved: int | None = None) -> Batch:
        """Return the batch. Only in the training process, before the next batch is requested.

        Blocks are copied out of their slot, unless the caller uses no more than `reserved` batches at a time and the
        ring preserves that many.
        """
        blocks = self.blocks
        if blocks is None:
            ring = find_ring(self.ring)
            blocks = ring.blocks(self.batch)
            if reserved is None or reserved > ring.reserved:
                blocks = {name: block.clone() for name, block in blocks.items()}
        target = {name: block for name, block in blocks.items() if name != "images"}
        target |= {name: torch.as_tensor(array) for name, array in self.target.items()}
        return Batch(blocks["images"], target, torch.as_tensor(self.positions), texts=self.texts)

    def pin_memory(self) -> WorkerBatch:
        """Move every array to pinned memory; called by DataLoader in a thread if a GPU is available.

        A copy to the GPU from other memory, even of a few labels, waits for everything the GPU still has to do.
        """
        if self.error is None:
            blocks = find_ring(self.ring).blocks(self.batch) if self.blocks is None else self.blocks
            self.blocks = {name: gpu.pin(block) for name, block in blocks.items()}
            self.target = {name: gpu.pin(torch.as_tensor(array)) for name, array in self.target.items()}
            self.positions = gpu.pin(torch.as_tensor(self.positions))
        return self


class Cropped(NamedTuple):
    """An image after its crop, and its target, moved with it."""

    planes: Planes
    geometry: Geometry
    target: Any


@dataclass(frozen=True)
class Reader:
    """Opens and crops images with their targets, and handles unreadable ones."""

    transform: TrainTransform | EvalTransform
    target: Target
    channels: int
    on_error: str

    def ring(self, workers: int, batch: int) -> SlotRing:
        """Return memory for batches of this many images."""
        size = self.transform.size
        specs = {
            name: BlockSpec((batch, *spec.shape), getattr(torch, spec.dtype))
            for name, spec in self.target.slot(size).items()
        }
        return SlotRing(workers, {"images": BlockSpec((batch, self.channels, *size)), **specs})

    def crop(self, image: LazyImage, target: Any, row: Row) -> Cropped:
        """Crop an open image and move its target. Raises UnreadableImage."""
        geometry = self.transform.geometry((image.height, image.width), row)
        return Cropped(self.transform.crop(image, geometry), geometry, self.target.move(target, geometry))

    def read(self, sample: Sample, row: Row, problem: Callable[[str], Problem]) -> Cropped | Problem:
        """Open and crop a sample, or return the problem if it is unreadable and may be skipped."""
        try:
            return self.crop(open_image(sample.image, self.channels), sample.target, row)
        except UnreadableImage as error:
            found = problem(str(error))
            if self.on_error == "raise":
                raise UserError(
                    f"{found.name}: {found.reason}; set data.on_error=skip to skip unreadable images"
                ) from error
            return found


class OpenSample(NamedTuple):
    """A sample between opening and cropping."""

    number: int
    """Index in the source."""
    target: Any
    image: LazyImage | None
    """None: unreadable."""

    @property
    def pixels(self) -> int:
        """Height times width."""
        return 0 if self.image is None else self.image.height * self.image.width


class MicroBatches(Dataset[WorkerBatch]):
    """Micro-batches by number and indices, built in a worker."""

    def __init__(self, source: ImageSource, reader: Reader, ring: SlotRing):
        self.source, self.reader, self.ring = source, reader, ring

    def __getitem__(self, item: tuple[int, Any]) -> WorkerBatch:
        batch, indices = item
        try:
            return self.build(batch, indices)
        except UserError as error:
            return failed(error)

    def build(self, batch: int, indices: Any) -> WorkerBatch:
        """Build the batch of this number from these indices."""
        raise NotImplementedError


class TrainBatches(MicroBatches):
    """Training batches of a source; indices are (positions, image indices)."""

    def __init__(self, source: ImageSource, reader: Reader, transform: TrainTransform, seed: int, ring: SlotRing):
        super().__init__(source, reader, ring)
        self.transform, self.seed = transform, seed

    def build(self, batch: int, indices: tuple[Ints, Ints]) -> WorkerBatch:
        """Build a batch of the images with these indices, augmented for these positions.

        Many small images are opened, then all are cropped, then all flipped, and so on: at 32 pixels that takes little
        more than half as long as completing one image after another.
        """
        positions, image_indices = indices
        builder = BatchBuilder(self.ring, self.reader.target, batch, positions)
        rows = uniforms(self.seed, positions, self.transform.slots).tolist()
        done = 0
        for samples in self._open_groups(image_indices.tolist()):
            group_rows = rows[done : done + len(samples)]
            crops = [self._crop(sample, row, builder.problems) for sample, row in zip(samples, group_rows, strict=True)]
            builder.put_group(done, crops, self._change(crops, group_rows))
            done += len(samples)
        return builder.finish()

    def _change(self, crops: list[Cropped], rows: list[list[float]]) -> list[Planes]:
        return self.transform.change([crop.planes for crop in crops], [crop.geometry for crop in crops], rows)

    def _open_groups(self, indices: list[int]) -> Iterator[list[OpenSample]]:
        """Yield open images in groups; large images come in small groups."""
        group: list[OpenSample] = []
        pixels = 0
        for index in indices:
            group.append(sample := self._open(index))
            pixels += max(sample.pixels, self.transform.size[0] * self.transform.size[1])
            if pixels >= _OPEN_PIXELS:
                yield group
                group, pixels = [], 0
        if group:
            yield group

    def _open(self, index: int) -> OpenSample:
        sample = self.source.read(index)
        try:
            return OpenSample(index, sample.target, open_image(sample.image, self.reader.channels))
        except UnreadableImage:
            return OpenSample(index, sample.target, None)

    def _crop(self, sample: OpenSample, row: Row, problems: list[Problem]) -> Cropped:
        """Crop the image, or the next one that is readable."""
        if sample.image is not None:
            try:
                return self.reader.crop(sample.image, sample.target, row)
            except UnreadableImage:
                pass  # Met again below, where it is named and counted.
        return self._crop_or_substitute(sample.number, row, problems)

    def _crop_or_substitute(self, index: int, row: Row, problems: list[Problem]) -> Cropped:
        for i in range(MAX_SUBSTITUTES):
            substitute = (index + i) % len(self.source)
            found = self.reader.read(self.source.read(substitute), row, _problem_at(self.source, substitute))
            if not isinstance(found, Problem):
                return found
            problems.append(found)
        raise too_many_unreadable(problems[-1])


class EvalBatches(MicroBatches):
    """Evaluation batches of a source; indices are image indices, -1 for padding."""

    def build(self, batch: int, indices: Ints) -> WorkerBatch:
        """Build a batch of these images; the positions of unreadable ones become -1."""
        builder = BatchBuilder(self.ring, self.reader.target, batch, indices.copy())
        for i, index in enumerate(indices.tolist()):
            if index < 0:
                builder.skip(i)
                continue
            found = self.reader.read(self.source.read(index), (), _problem_at(self.source, index))
            if isinstance(found, Problem):
                builder.skip(i, found)
            else:
                builder.put(i, found.planes, found.target)
        return builder.finish()


class BatchBuilder:
    """A batch under construction, in its slot."""

    def __init__(self, ring: SlotRing, target: Target, batch: int, positions: Ints):
        self.ring, self.target, self.batch, self.positions = ring, target, batch, positions
        self.problems: list[Problem] = []
        self._blocks = ring.blocks(batch)
        self._pixels = self._blocks["images"].numpy()
        self._targets: list[Any] = [None] * len(positions)

    def put(self, i: int, planes: Planes, target: Any) -> None:
        """Set image `i` of the batch."""
        self._pixels[i] = planes
        self._targets[i] = target

    def put_group(self, start: int, crops: Sequence[Cropped], planes: Sequence[Planes]) -> None:
        """Set the images from `start` on."""
        for i, (crop, x) in enumerate(zip(crops, planes, strict=True), start):
            self.put(i, x, crop.target)

    def skip(self, i: int, problem: Problem | None = None) -> None:
        """Leave no image at `i`: black, and not counted."""
        self._pixels[i] = 0
        self.positions[i] = -1
        if problem is not None:
            self.problems.append(problem)

    def finish(self) -> WorkerBatch:
        """Return the finished batch."""
        memory = {name: block.numpy() for name, block in self._blocks.items() if name != "images"}
        target, texts = self.target.collate(self._targets, memory)
        blocks = None if self.ring.is_shared else self._blocks
        return WorkerBatch(self.batch, self.ring.number, self.positions, self.problems, target, texts, blocks)


def failed(error: UserError) -> WorkerBatch:
    """Return the result of a worker that failed."""
    return WorkerBatch(-1, -1, np.empty(0, np.int64), [], error=str(error))


def _problem_at(source: ImageSource, index: int) -> Callable[[str], Problem]:
    return lambda reason: Problem(index, source.describe(index), reason)


def too_many_unreadable(last: Problem) -> UserError:
    """Return the error for data that skipping does not help."""
    return UserError(f"{MAX_SUBSTITUTES} consecutive images are unreadable; the last is {last.name}: {last.reason}")
