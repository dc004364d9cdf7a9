"""Open the training and validation images of a run, and check them before any model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vit_scale.config import DataConfig
from vit_scale.data.batch import DataInfo, ImageSource
from vit_scale.data.class_sizes import class_notes, describe_sizes, imbalance_note
from vit_scale.data.images.decode import UnreadableImage, count_channels
from vit_scale.data.sources.columns import find_image_column
from vit_scale.data.sources.embedded import SyntheticSource
from vit_scale.data.sources.splits import open_splits, overlap_note, pick_splits, unused_splits
from vit_scale.data.sources.streams import StreamSource, count_images, open_stream
from vit_scale.data.sources.table_source import Source, hold_out
from vit_scale.data.targets import ClassTarget, Columns, NoTarget, Target
from vit_scale.errors import UserError
from vit_scale.format import counted


@dataclass(frozen=True)
class Data:
    """Training and validation images of a run."""

    train: ImageSource
    val: ImageSource
    class_names: tuple[str, ...]
    """Empty if the target has no classes."""
    in_chans: int
    description: str
    """One line for users: source, number of images and classes."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Further lines of the header: how the images are split, and the smallest and largest class."""
    file_notes: tuple[str, ...] = ()
    """Files that are not read, for the user."""
    class_notes: tuple[str, ...] = ()
    """Classes with too few images, for the user."""
    imbalance_note: str | None = None
    """A warning about classes of uneven size, unless options even them out."""

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def notes(self) -> tuple[str, ...]:
        """Everything a user should know before training."""
        return self.file_notes + self.class_notes + ((self.imbalance_note,) if self.imbalance_note else ())

    @property
    def info(self) -> DataInfo:
        """What a task may know about the data."""
        return DataInfo(count_images(self.train), self.in_chans, self.class_names, self._class_counts())

    def _class_counts(self) -> tuple[int, ...]:
        if not self.class_names or isinstance(self.train, StreamSource) or self.train.labels is None:
            return ()
        return tuple(np.bincount(self.train.labels, minlength=self.num_classes).tolist())


def open_data(config: DataConfig, target: Target | None = None, *, seed: int) -> Data:
    """Open the training and validation images named in the options, with their targets (default: class labels).

    Raises UserError, which says how to fix it, if something is missing. `seed` applies to synthetic images only; a
    hold-out is the same for all seeds, so that runs with different seeds are evaluated on the same images.
    """
    target = target or ClassTarget()
    if config.source == "synthetic":
        return _open_synthetic(config, target, seed)
    if config.streaming:
        train_stream, val_stream, names = open_stream(config, target)
        count = f"{train_stream.length:,}" if train_stream.length is not None else "an unknown number of"
        description = f"{config.source} (streaming, {count} training images{_classes(names)})"
        return Data(train_stream, val_stream, names, train_stream.channels(), description)
    splits = open_splits(config, target)
    train, val, names, val_split = _open_tables(config, target, splits.by_name)
    for source in (train, val):
        check_labels(source, len(names))
    return Data(
        train,
        val,
        names,
        _channels(train),
        _describe(config.source, len(train), len(val), names),
        {"split": _describe_split(config, splits.by_name, val_split, names)} | describe_sizes(train.labels, names),
        splits.notes + overlap_note(config, splits.by_name),
        class_notes(train.labels, val.labels, names, config, is_held_out=val_split is None),
        None if config.balance else imbalance_note(train.labels, names, config),
    )


def check_labels(source: ImageSource, num_classes: int) -> None:
    """Raise UserError if there is no image, or one whose label is not among `num_classes` classes.

    The labels of a stream are checked when they are read.
    """
    if isinstance(source, StreamSource):
        return
    if len(source) == 0:
        raise UserError(f"data.source: {source.name} has no images")
    labels = source.labels
    if labels is None:
        return
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


def _open_tables(
    config: DataConfig, target: Target, splits: Mapping[str, Any]
) -> tuple[Source, Source, tuple[str, ...], str | None]:
    """Return the training and validation images, the class names, and the validation split; None if held out."""
    train_set, val_set, val_split = pick_splits(config, splits)
    names = target.class_names(train_set, target.find(train_set.features, config), config)
    train = _as_source(train_set, config, target, names, config.train_split)
    if val_set is not None:
        return train, _as_source(val_set, config, target, names, val_split), names, val_split
    if len(train) < 2:
        raise UserError(f"data.source: {train.name} has {len(train)} images; at least 2 are needed to hold one out")
    held_out = hold_out(train, config.val_fraction)
    return train.subset(np.flatnonzero(~held_out)), train.subset(np.flatnonzero(held_out)), names, None


def _as_source(dataset: Any, config: DataConfig, target: Target, names: tuple[str, ...], split: str) -> Source:
    image_column = find_image_column(dataset.features, config)
    columns = Columns(target.find(dataset.features, config), names)
    return Source(dataset, image_column, target.values(dataset, columns), f"{config.source} [{split}]")


def _open_synthetic(config: DataConfig, target: Target, seed: int) -> Data:
    if not isinstance(target, ClassTarget | NoTarget):
        raise UserError(f"data.source=synthetic: synthetic images have no {target.kind}")
    count, classes = config.synthetic_images, config.synthetic_classes
    val_count = max(1, round(count * config.val_fraction))
    train = SyntheticSource(count, classes, config.synthetic_size, config.synthetic_chans, "synthetic", seed)
    val = replace(train, length=val_count, first=count)
    names = tuple(str(i) for i in range(classes)) if isinstance(target, ClassTarget) else ()
    return Data(train, val, names, config.synthetic_chans, _describe("synthetic", count, val_count, names))


def _channels(source: Source) -> int:
    """Return the channels of the images, judged by a sample spread over the source: one in color makes all color."""
    sample = np.unique(np.linspace(0, len(source) - 1, 32).astype(np.int64))
    counts = []
    for index in sample:
        try:
            counts.append(count_channels(source.read(int(index)).image))
        except UnreadableImage:
            continue  # Handled by data.on_error when it is loaded.
    return max(counts, default=3)


def _describe(source: str, train: int, val: int, names: tuple[str, ...]) -> str:
    return f"{source} ({counted(train, 'training image')}, {counted(val, 'validation image')}{_classes(names)})"


def _describe_split(
    config: DataConfig, splits: Mapping[str, Any], val_split: str | None, names: tuple[str, ...]
) -> str:
    others = [f"{name} ({counted(len(splits[name]), 'image')})" for name in unused_splits(config, splits, val_split)]
    unused = f"; not used: {', '.join(others)}" if others else ""
    if val_split is not None:
        return f"{config.train_split} (training), {val_split} (validation){unused}"
    each = " of each class" if names else ""
    return f"{100 * config.val_fraction:.3g}%{each} of {config.train_split} held out for validation{unused}"


def _classes(names: tuple[str, ...]) -> str:
    return f", {counted(len(names), 'class', 'classes')}" if names else ""
