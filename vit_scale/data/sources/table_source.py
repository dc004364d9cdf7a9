"""What a run trains and evaluates on: opened by `datasets`, checked before any model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vit_scale.config import DataConfig
from vit_scale.data.batch import DataInfo, ImageSource, Sample
from vit_scale.data.images.decode import BrokenImage, count_channels
from vit_scale.data.sources.columns import (
    ImageColumn,
    class_names_of,
    find_image_column,
    find_label_column,
    read_labels,
)
from vit_scale.data.sources.embedded import SyntheticSource
from vit_scale.data.sources.splits import open_splits, pick_splits
from vit_scale.data.sources.streams import StreamSource, open_stream
from vit_scale.errors import UserError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """Images and labels of one split of a dataset. The table is a memory map that all processes share."""

    dataset: Any
    image_column: str
    table_labels: Ints
    name: str
    rows: Ints | None = None
    """The rows of the table that belong here; None: all, in order."""

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Sample:
        """The stored image (bytes without a copy, a path, or pixels) and its label."""
        row = self._row(index)
        return Sample(self._images.read(row), int(self.table_labels[row]))

    def describe(self, index: int) -> str:
        """How a message names this image: its file where known, else its row."""
        row = self._row(index)
        path = self._images.path(row)
        return f"{path} (row {row} of {self.name})" if path else f"row {row} of {self.name}"

    @property
    def labels(self) -> Ints:
        """Labels of all images, in the order of `read`."""
        return self.table_labels if self.rows is None else self.table_labels[self.rows]

    def subset(self, places: Ints) -> Source:
        """The images at these places of this source."""
        return replace(self, rows=places if self.rows is None else self.rows[places])

    def _row(self, index: int) -> int:
        return index if self.rows is None else int(self.rows[index])

    @cached_property
    def _images(self) -> ImageColumn:
        return ImageColumn(self.dataset, self.image_column)

    def __getstate__(self) -> dict[str, Any]:
        # Views into the memory map are made anew in each process.
        return {key: value for key, value in self.__dict__.items() if key != "_images"}


@dataclass(frozen=True)
class Data:
    """What a run trains and evaluates on."""

    train: ImageSource
    val: ImageSource
    num_classes: int
    class_names: tuple[str, ...]
    in_chans: int
    description: str
    """One line for people: source, numbers of images and classes."""

    @property
    def info(self) -> DataInfo:
        """What a task knows of the data."""
        images = getattr(self.train, "length", None) if isinstance(self.train, StreamSource) else len(self.train)
        return DataInfo(images or 0, self.in_chans, self.class_names)


def open_data(config: DataConfig, *, seed: int) -> Data:
    """Open the training and the validation images that the options name.

    Raises UserError, which says what to do, for whatever cannot be had. `seed` is that of synthetic images; a hold-out
    is the same for all seeds, so that runs with different seeds are evaluated on the same images.
    """
    if config.source == "synthetic":
        return _open_synthetic(config, seed)
    if config.streaming:
        train_stream, val_stream, names = open_stream(config)
        description = f"{config.source} (streaming): {_count(train_stream)} training images, {len(names):,} classes"
        return Data(train_stream, val_stream, len(names), names, train_stream.channels(), description)
    train, val, names = _open_tables(config, open_splits(config))
    for source in (train, val):
        check_labels(source, len(names))
    images = f"{len(train):,} training and {len(val):,} validation images"
    return Data(train, val, len(names), names, _channels(train), f"{config.source}: {images}, {len(names):,} classes")


def check_labels(source: ImageSource, num_classes: int) -> None:
    """Raise UserError if there is no image, or one whose label is not among `num_classes` classes.

    A stream's labels are checked when they are read.
    """
    if isinstance(source, StreamSource):
        return
    labels = source.labels
    if len(labels) == 0:
        raise UserError(f"data.source: {source.name} has no images")
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong) == 0:
        return
    first = int(wrong[0])
    advice = (
        "the split seems to have no labels: choose another one with data.train_split or data.val_split"
        if labels[first] < 0
        else "choose the right data.label_column, or raise model.num_classes"
    )
    raise UserError(
        f"data.source: {source.describe(first)} has label {labels[first]}, outside 0..{num_classes - 1} "
        f"({len(wrong):,} such images); {advice}"
    )


def balanced_holdout(labels: Ints, fraction: float) -> npt.NDArray[np.bool_]:
    """Mask of a hold-out: of each class its share up to rounding, always the same images.

    Images are sorted by class, shuffled within, and every k-th one is taken: rare classes get their share together.
    """
    n = len(labels)
    shuffled = np.random.default_rng(0).permutation(n)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    count = min(max(1, round(fraction * n)), n - 1)
    mask = np.zeros(n, dtype=bool)
    mask[by_class[((np.arange(count) + 0.5) * n / count).astype(np.int64)]] = True
    return mask


def _open_tables(config: DataConfig, splits: Mapping[str, Any]) -> tuple[Source, Source, tuple[str, ...]]:
    train_set, val_set = pick_splits(config, splits)
    names = class_names_of(train_set, find_label_column(train_set.features, config), config)
    train = _as_source(train_set, config, names, config.train_split)
    if val_set is not None:
        return train, _as_source(val_set, config, names, config.val_split or "validation"), names
    if len(train) < 2:
        raise UserError(f"data.source: {train.name} has {len(train)} images; at least 2 are needed to hold one out")
    held_out = balanced_holdout(train.labels, config.val_fraction)
    return train.subset(np.flatnonzero(~held_out)), train.subset(np.flatnonzero(held_out)), names


def _as_source(dataset: Any, config: DataConfig, names: tuple[str, ...], split: str) -> Source:
    image_column = find_image_column(dataset.features, config)
    labels = read_labels(dataset, find_label_column(dataset.features, config), names, config)
    return Source(dataset, image_column, labels, f"{config.source} [{split}]")


def _open_synthetic(config: DataConfig, seed: int) -> Data:
    count, classes = config.synthetic_images, config.synthetic_classes
    val_count = max(1, round(count * config.val_fraction))
    train = SyntheticSource(count, classes, config.synthetic_size, config.synthetic_chans, "synthetic", seed)
    val = replace(train, length=val_count, first=count)
    description = f"synthetic: {count:,} training and {val_count:,} validation images, {classes:,} classes"
    names = tuple(str(i) for i in range(classes))
    return Data(train, val, classes, names, config.synthetic_chans, description)


def _channels(source: Source) -> int:
    """Channels of the images, judged by some that are spread over the source: one in colour makes all colour."""
    some = np.unique(np.linspace(0, len(source) - 1, 32).astype(np.int64))
    counts = []
    for index in some:
        try:
            counts.append(count_channels(source.read(int(index)).image))
        except BrokenImage:
            continue  # Broken images are `on_error`'s business, when they are met.
    return max(counts, default=3)


def _count(source: StreamSource) -> str:
    return "an unknown number of" if source.length is None else f"{source.length:,}"
