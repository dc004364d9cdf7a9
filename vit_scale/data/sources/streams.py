"""Sources that are read while training, never stored: `data.streaming`.

Every process reads its own shards (or, where they do not divide evenly, its own share of the images) over and over, so
that none waits for another at the end of an epoch. What a stream cannot keep: an epoch is not each image exactly once,
shuffling reaches only as far as a buffer, the order depends on the number of processes and workers, and a resumed run
goes on with other images instead of the next ones. Augmentation and mixing follow from the position as always.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vit_scale.config import DataConfig
from vit_scale.data.batch import Sample
from vit_scale.data.images.decode import BrokenImage, count_channels
from vit_scale.data.sources.columns import find_image_column, find_label_column
from vit_scale.data.sources.splits import open_splits, pick_splits
from vit_scale.errors import UserError

_SHUFFLE_BUFFER = 2048
"""Encoded images that are held for shuffling in each worker."""


@dataclass(frozen=True)
class StreamSource:
    """Images of one split, in the order in which they come."""

    dataset: Any
    image_column: str
    label_column: str
    num_classes: int
    name: str
    length: int | None
    """Number of images, where the dataset's own description says it."""

    def __len__(self) -> int:
        if self.length is None:
            raise UserError(f"data.streaming: {self.name} does not say how many images it has; use schedule.steps")
        return self.length

    def samples(self, rank: int, world: int, shuffle_seed: int | None) -> Iterator[Sample]:
        """This process's (and worker's) images, once through."""
        from datasets.distributed import split_dataset_by_node

        stream = self.dataset
        if shuffle_seed is not None:
            stream = stream.shuffle(seed=shuffle_seed, buffer_size=_SHUFFLE_BUFFER)
        for row in split_dataset_by_node(stream, rank, world):
            yield self._sample(row)

    def shards(self, world: int) -> int:
        """How many workers of one process can read at the same time."""
        shards = self.dataset.num_shards
        return shards // world if shards % world == 0 else shards

    def channels(self) -> int:
        """Channels of the first images: one in colour makes all of them colour."""
        counts = []
        for sample in itertools.islice(self.samples(0, 1, None), 16):
            try:
                counts.append(count_channels(sample.image))
            except BrokenImage:
                continue
        return max(counts, default=3)

    def _sample(self, row: dict[str, Any]) -> Sample:
        image, label = row[self.image_column], row[self.label_column]
        if isinstance(image, dict):
            image = image["bytes"] if image["bytes"] is not None else image["path"]
        if not isinstance(label, int) or not 0 <= label < self.num_classes:
            raise UserError(
                f"data.source: an image of {self.name} has label {label}, outside 0..{self.num_classes - 1}"
            )
        return Sample(image if not isinstance(image, list) else np.asarray(image), label)

    # A stream has no images by index.
    def read(self, index: int) -> Sample:
        raise TypeError("a stream cannot be read by index")

    def describe(self, index: int) -> str:
        """How a message names an image: by its number in what was read."""
        return f"image {index} as read from {self.name}"

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        raise TypeError("a stream's labels are known when they are read")


def open_stream(config: DataConfig) -> tuple[StreamSource, StreamSource, tuple[str, ...]]:
    """Training stream, validation stream and class names."""
    train, val = pick_splits(config, open_splits(config))
    if val is None:
        raise UserError(
            f"data.streaming: {config.source} has no validation split, and none can be held out of a stream; "
            "name one in data.val_split, or set data.streaming=false"
        )
    label_column = find_label_column(train.features, config)
    names = getattr(train.features[label_column], "names", None)
    if names is None:
        raise UserError(
            f"data.streaming: the column {label_column} of {config.source} has no class names, so the number of "
            "classes is not known before everything is read; set data.streaming=false"
        )
    train_split, val_split = config.train_split, config.val_split or "validation"
    return (
        _as_stream(train, config, len(names), train_split),
        _as_stream(val, config, len(names), val_split),
        tuple(names),
    )


def _as_stream(dataset: Any, config: DataConfig, num_classes: int, split: str) -> StreamSource:
    import datasets

    image_column = find_image_column(dataset.features, config)
    label_column = find_label_column(dataset.features, config)
    splits = dataset.info.splits or {}
    length = splits[str(dataset.split)].num_examples if str(dataset.split) in splits else None
    dataset = dataset.select_columns([image_column, label_column])
    if isinstance(dataset.features[image_column], datasets.Image):
        dataset = dataset.cast_column(image_column, datasets.Image(decode=False))
    return StreamSource(dataset, image_column, label_column, num_classes, f"{config.source} [{split}]", length)
