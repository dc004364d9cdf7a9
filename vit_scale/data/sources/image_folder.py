"""A directory of images by class: splits from its top directories, classes from the directories below.

    photos/cat/1.jpg         one split, `train`
    photos/Train/cat/1.jpg   splits by directories named train, val, valid, validation or test, in any case
    photos/cat/2020/1.jpg    belongs to class cat, unless data.class_level=2

Every file that looks like an image is read, rejected by name, or counted in a note.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vit_scale.config import DataConfig
from vit_scale.data.sources.image_table import image_column, make_dataset
from vit_scale.data.sources.scan import Scan, describe_skipped, describe_unreadable
from vit_scale.errors import UserError
from vit_scale.format import counted, printable, some

_SPLIT_DIRECTORIES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_NO_SPLIT_DIRECTORIES = {"training": "train", "testing": "test", "dev": "val", "eval": "val", "evaluation": "val"}
"""Directories that other tools read as splits."""


class Place(NamedTuple):
    """Where a directory is: its split, and its directories within the split."""

    split: str | None
    """None outside of the split directories."""
    below: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Which directories are splits, and which are classes."""

    splits: Mapping[str, str]
    """Top directories that are splits, with their meaning; if empty, everything is `train`."""
    level: int | None
    """Directory level within a split that names the class, 1 for the top one; None if there are no classes."""
    names: list[str]

    def place(self, directory: str) -> Place:
        """Return the split of a directory, and where it is within the split."""
        return _place(directory, self.splits)

    def class_of(self, place: Place) -> str:
        """Return the class of a directory; empty if it is above the class directories."""
        return place.below[self.level - 1] if self.level and len(place.below) >= self.level else ""


@dataclass
class _Rows:
    """Images of one split, in order."""

    paths: list[str] = field(default_factory=list)
    labels: list[int | None] = field(default_factory=list)


def read_image_folder(scan: Scan, config: DataConfig, *, needs_class: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the splits of a directory of images, by the name of their directory, and notes about what was skipped.

    Without `needs_class`, images outside of class directories are read too.
    """
    layout = find_layout(scan, config, needs_class=needs_class)
    if needs_class:
        _check_classes(scan, layout, config)
    number = {name: i for i, name in enumerate(layout.names)}
    rows: dict[str, _Rows] = defaultdict(_Rows)
    outside: list[str] = []
    loose: list[str] = []
    for directory, files in scan.images:
        place = layout.place(directory)
        label = number.get(layout.class_of(place))
        prefix = f"{directory}/" if directory else ""
        if place.split is None:
            outside += [prefix + name for name in files]
        elif label is None and needs_class:
            loose += [prefix + name for name in files]
        else:
            rows[place.split].paths += [f"{scan.root}/{prefix}{name}" for name in files]
            rows[place.split].labels += itertools.repeat(label, len(files))
    if not rows:
        raise UserError(
            f"data.source={config.source}: no images in {some(list(layout.splits))}; images are in {some(outside)}"
        )
    found = {split: _as_dataset(each, layout.names) for split, each in rows.items()}
    return found, _notes(scan, layout, config, outside, loose)


def find_layout(scan: Scan, config: DataConfig, *, needs_class: bool) -> Layout:
    """Return which directories are splits and classes; raise UserError if that is in doubt, and `needs_class`."""
    splits = split_directories(scan)
    places = [_place(group.directory, splits) for group in scan.images]
    if needs_class:
        _check_split_directories(scan, places, splits)
    level = _class_level({place.below for place in places if place.split}, config, needs_class)
    layout = Layout(splits, level, [])
    names = sorted({layout.class_of(place) for place in places if place.split} - {""})
    return replace(layout, names=names)


def split_directories(scan: Scan) -> dict[str, str]:
    """Return the top directories that are splits, with what they mean; two of the same meaning are an error."""
    found: dict[str, str] = {}
    for directory in scan.directories:
        meaning = _SPLIT_DIRECTORIES.get(directory.lower())
        if meaning is None:
            continue
        for other, same in found.items():
            if same == meaning:
                raise UserError(
                    f"data.source={scan.root}: directories {other} and {directory} are both the {meaning} split; "
                    "merge them, or rename one"
                )
        found[directory] = meaning
    return found


def _place(directory: str, splits: Mapping[str, str]) -> Place:
    parts = tuple(directory.split("/")) if directory else ()
    if not splits:
        return Place("train", parts)
    return Place(parts[0], parts[1:]) if parts and parts[0] in splits else Place(None, parts)


def _check_split_directories(scan: Scan, places: Sequence[Place], splits: Mapping[str, str]) -> None:
    """Raise UserError for directories that may be meant as splits or as classes."""
    misnamed = [name for name in scan.directories if name.lower() in _NO_SPLIT_DIRECTORIES]
    for name in misnamed:
        if any(path.startswith(f"{name}/") for path in scan.directories):
            raise UserError(
                f"data.source={scan.root}: directory {name} is not read as a split; "
                f"rename it to {_NO_SPLIT_DIRECTORIES[name.lower()]} (splits: {', '.join(_SPLIT_DIRECTORIES)})"
            )
    outside = sorted({place.below[0] for place in places if place.split is None and place.below})
    inside = [place for place in places if place.split]
    if outside and inside and not any(place.below for place in inside):
        split = inside[0].split
        raise UserError(
            f"data.source={scan.root}: directory {split} is read as a split, but has no class directories, and there "
            f"are images in {some(outside)}.\nIf {split} is a class, rename it; otherwise move the others into it."
        )


def _class_level(below: set[tuple[str, ...]], config: DataConfig, needs_class: bool) -> int | None:
    """Return which directory level names the class, 1 for the top one; None if there are no classes.

    The top one, even if images are deeper (photos/cat/2020/1.jpg). An error if that is doubtful: all images are deeper,
    and the directories that they are in have different names (photos/pets/cat, photos/wild/fox).
    """
    below = below - {()}
    if not below:
        return None
    if config.class_level is not None:
        return config.class_level
    second = {path[:2] for path in below}
    if min(map(len, below)) == 1 or len(second) == 1 or len({path[1] for path in second}) < len(second):
        return 1
    if not needs_class:
        return None
    upper, lower = sorted({path[0] for path in second}), sorted({path[1] for path in second})
    if all(name.lower() in _SPLIT_DIRECTORIES for name in lower):
        raise UserError(
            f"data.source={config.source}: its only directory, {upper[0]}, contains the splits {some(lower)}; "
            f"set data.source={config.source.rstrip('/')}/{upper[0]}"
        )
    where = some(["/".join(path) for path in sorted(second)])
    raise UserError(
        f"data.source={config.source}: all images are two directories deep ({where});\nchoose which directories are "
        f"classes: data.class_level=1 ({some(upper)}) or data.class_level=2 ({some(lower)})"
    )


def _check_classes(scan: Scan, layout: Layout, config: DataConfig) -> None:
    """Raise UserError if there are no classes, or for a class all of whose images have a format that is not read."""
    if not layout.names:
        count = "1 image" if scan.count == 1 else f"{scan.count:,} images"
        level = f" at level {config.class_level}" if config.class_level else ""
        raise UserError(
            f"data.source={config.source}: {count}, but no class directories{level}; put the images into one directory "
            "per class, or name a table of labels with data.labels"
        )
    lost: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path, reason in scan.unreadable:
        place = layout.place(os.path.dirname(path))
        name = layout.class_of(place)
        if place.split and name and name not in layout.names:
            lost[name].append((path, reason))
    if lost:
        first, *others = sorted(lost)
        more = f"; likewise {some(others)}" if others else ""
        raise UserError(
            f"data.source={config.source}: no image of class {printable(first)} can be read: "
            f"{', '.join(describe_unreadable(lost[first]))}{more}.\n"
            "To train without such a class, move its directory elsewhere."
        )


def _empty_directories(scan: Scan, layout: Layout) -> list[str]:
    """Return the split and class directories that have no images."""
    depths = (0, layout.level or 1)
    used = {
        (place.split, place.below[:depth])
        for group in scan.images
        for depth in depths
        if (place := layout.place(group.directory))
    }
    places = {path: layout.place(path) for path in scan.directories}
    return [path for path, place in places.items() if place.split and len(place.below) in depths and place not in used]


def _notes(scan: Scan, layout: Layout, config: DataConfig, outside: list[str], loose: list[str]) -> tuple[str, ...]:
    texts = [describe_skipped(scan.unreadable, [*scan.others, *scan.metadata, *scan.parquet])]
    for kind, paths in (("split", outside), ("class", loose)):
        if paths:
            texts.append(f"{counted(len(paths), 'image')} outside of the {kind} directories skipped: {some(paths)}")
    deeper = [
        group.directory for group in scan.images if len(layout.place(group.directory).below) > (layout.level or 99)
    ]
    if deeper:
        first, *others = dict.fromkeys(deeper)
        more = f" (and {counted(len(others), 'other')})" if others else ""
        name = printable(layout.class_of(layout.place(first)))
        texts.append(f"images of deeper directories belong to the class above: {printable(first)} to {name}{more}")
    if empty := _empty_directories(scan, layout):
        texts.append(
            f"{len(empty):,} {'directory' if len(empty) == 1 else 'directories'} without images: {some(empty)}"
        )
    return tuple(f"{config.source}: {text}" for text in texts if text)


def _as_dataset(rows: _Rows, class_names: list[str]) -> Any:
    import datasets
    import pyarrow as pa

    columns: dict[str, Any] = {"image": image_column(rows.paths)}
    features: dict[str, Any] = {"image": datasets.Image()}
    if class_names:
        columns["label"] = pa.array(rows.labels, pa.int64())
        features["label"] = datasets.ClassLabel(names=class_names)
    return make_dataset(columns, features)
