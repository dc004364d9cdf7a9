"""Sources that are read while training and never stored: `data.streaming`.

Every process reads its own shards (or its own part of the images, if the shards do not divide evenly) over and over, so
that none waits for another at the end of an epoch. Limitations of streams: an epoch does not visit each image exactly
once, shuffling is limited to a buffer, the order depends on the number of processes and workers, and a resumed run
continues with different images rather than the next ones. Augmentation and mixing are functions of the position, as
always.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vit_scale.config import DataConfig
from vit_scale.data.batch import ImageSource, Sample
from vit_scale.data.images.decode import UnreadableImage, count_channels
from vit_scale.data.sources.columns import find_image_column
from vit_scale.data.sources.splits import open_splits, pick_splits
from vit_scale.data.targets import ClassTarget, Columns, Target
from vit_scale.errors import UserError

_SHUFFLE_BUFFER = 2048
"""Encoded images that each worker holds for shuffling."""


@dataclass(frozen=True)
class StreamSource:
    """Images of one split, in the order in which they arrive."""

    dataset: Any
    image_column: str
    target: Target
    columns: Columns
    name: str
    length: int | None
    """Number of images, if the dataset's description has it."""

    def __len__(self) -> int:
        if self.length is None:
            raise UserError(f"data.streaming: the number of images of {self.name} is unknown; use schedule.steps")
        return self.length

    def samples(self, rank: int, world: int, shuffle_seed: int | None) -> Iterator[Sample]:
        """Yield the images of this process (and worker), once."""
        from datasets.distributed import split_dataset_by_node

        stream = self.dataset
        if shuffle_seed is not None:
            stream = stream.shuffle(seed=shuffle_seed, buffer_size=_SHUFFLE_BUFFER)
        for row in split_dataset_by_node(stream, rank, world):
            yield self._sample(row)

    def shards(self, world: int) -> int:
        """Return the number of workers of one process that can read simultaneously."""
        shards = self.dataset.num_shards
        return shards // world if shards % world == 0 else shards

    def channels(self) -> int:
        """Return the channels of the first images: one in color makes all color."""
        counts = []
        for sample in itertools.islice(self.samples(0, 1, None), 16):
            try:
                counts.append(count_channels(sample.image))
            except UnreadableImage:
                continue
        return max(counts, default=3)

    def _sample(self, row: dict[str, Any]) -> Sample:
        image = row[self.image_column]
        if isinstance(image, dict):
            image = image["bytes"] if image["bytes"] is not None else image["path"]
        try:
            target = self.target.read(row, self.columns)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from error
        return Sample(image if not isinstance(image, list) else np.asarray(image), target)

    # A stream has no images by index.
    def read(self, index: int) -> Sample:
        raise TypeError("a stream cannot be read by index")

    def read_target(self, index: int) -> Any:
        raise TypeError("a stream cannot be read by index")

    def describe(self, index: int) -> str:
        """Name an image in messages: by its number in reading order."""
        return f"image {index} as read from {self.name}"

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        raise TypeError("the labels of a stream are unknown until they are read")


def count_images(source: ImageSource) -> int:
    """Return the number of images; 0 for a stream of unknown length."""
    return (source.length or 0) if isinstance(source, StreamSource) else len(source)


def open_stream(config: DataConfig, target: Target) -> tuple[StreamSource, StreamSource, tuple[str, ...]]:
    """Return the training stream, the validation stream and the class names."""
    train, val, val_split = pick_splits(config, open_splits(config, target).by_name)
    if val is None:
        raise UserError(
            f"data.streaming: {config.source} has no validation split, and a stream cannot be split; "
            "set data.val_split, or data.streaming=false"
        )
    columns = target.find(train.features, config)
    if isinstance(target, ClassTarget) and getattr(train.features[columns[0]], "names", None) is None:
        raise UserError(
            f"data.streaming: column {columns[0]} of {config.source} has no class names, so the number of "
            "classes is unknown until everything is read; set data.streaming=false"
        )
    names = target.class_names(train, columns, config)
    return (
        _as_stream(train, config, target, names, config.train_split),
        _as_stream(val, config, target, names, val_split),
        names,
    )


def _as_stream(dataset: Any, config: DataConfig, target: Target, names: tuple[str, ...], split: str) -> StreamSource:
    import datasets

    image_column = find_image_column(dataset.features, config)
    columns = Columns(target.find(dataset.features, config), names)
    splits = dataset.info.splits or {}
    length = splits[str(dataset.split)].num_examples if str(dataset.split) in splits else None
    dataset = dataset.select_columns([image_column, *columns.names])
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
    return StreamSource(dataset, image_column, target, columns, f"{config.source} [{split}]", length)
