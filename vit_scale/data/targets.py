"""What a sample has besides its image: a class, captions, or nothing; masks and boxes are in spatial_targets.py.

A `Target` finds its columns, reads a row, moves the value with the image, and collates the values of a batch. It runs
in data-loading workers: it is picklable and works on numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vit_scale.config import DataConfig
from vit_scale.data.augment.geometry import Geometry
from vit_scale.data.augment.transforms import TrainTransform
from vit_scale.data.sources.columns import class_names_of, find_column, find_label_column, read_labels
from vit_scale.errors import UserError

Arrays = dict[str, npt.NDArray[Any]]
Values = Sequence[Any] | npt.NDArray[np.int64]
"""Target values of a table, by row."""
Collated = tuple[Arrays, list[list[str]]]
"""Arrays by name, and the captions of each image if there are any."""
_TEXT_NAMES = ("text", "caption", "captions", "sentences", "raw", "txt")


class Columns(NamedTuple):
    """The columns of a table that a target reads, and the class names."""

    names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()


class SlotSpec(NamedTuple):
    """A fixed-size array per image, which workers write into shared memory."""

    shape: tuple[int, ...]
    dtype: str


class Target(Protocol):
    """Reads, moves and collates what a sample has besides its image."""

    @property
    def kind(self) -> str:
        """Name in messages, in the plural."""

    @property
    def is_spatial(self) -> bool:
        """Whether the target must be moved together with the pixels."""

    def find(self, features: Mapping[str, Any], config: DataConfig) -> tuple[str, ...]:
        """Return the columns to read; raise UserError if one is missing."""

    def class_names(self, dataset: Any, columns: tuple[str, ...], config: DataConfig) -> tuple[str, ...]:
        """Return the class names; empty if there are no classes."""

    def values(self, dataset: Any, columns: Columns) -> Values:
        """Return the values of all rows of a table, by row."""

    def read(self, row: Mapping[str, Any], columns: Columns) -> Any:
        """Return the value of one row, as stored."""

    def move(self, value: Any, geometry: Geometry) -> Any:
        """Apply the crop, resize, padding and flips of the image. Raises UnreadableImage."""

    def collate(self, values: Sequence[Any], memory: Arrays) -> Collated:
        """Return the arrays and captions of a batch; None stands for the value of an image that is missing.

        `memory` has one array [m, ...] per entry of `slot`, to be filled.
        """

    def slot(self, size: tuple[int, int]) -> dict[str, SlotSpec]:
        """Return the fixed-size arrays per image; what `collate` returns besides is sent with the batch."""


@dataclass(frozen=True)
class NoTarget:
    """No target: images alone."""

    kind = "nothing"
    is_spatial = False

    def find(self, features: Mapping[str, Any], config: DataConfig) -> tuple[str, ...]:
        """Return no columns."""
        return ()

    def class_names(self, dataset: Any, columns: tuple[str, ...], config: DataConfig) -> tuple[str, ...]:
        """Return no names."""
        return ()

    def values(self, dataset: Any, columns: Columns) -> Values:
        """Return None for every row."""
        return NoValues(len(dataset))

    def read(self, row: Mapping[str, Any], columns: Columns) -> None:
        """Return None."""

    def move(self, value: Any, geometry: Geometry) -> None:
        """Return None."""

    def collate(self, values: Sequence[Any], memory: Arrays) -> Collated:
        """Return no arrays."""
        return {}, []

    def slot(self, size: tuple[int, int]) -> dict[str, SlotSpec]:
        """Return no arrays."""
        return {}


@dataclass(frozen=True)
class ClassTarget:
    """One class per image: {"label": int64 [m]}, 0 if the image is missing."""

    kind = "labels"
    is_spatial = False

    def find(self, features: Mapping[str, Any], config: DataConfig) -> tuple[str, ...]:
        """Return the label column."""
        return (find_label_column(features, config),)

    def class_names(self, dataset: Any, columns: tuple[str, ...], config: DataConfig) -> tuple[str, ...]:
        """Return the names of the feature, sorted strings of a text column, or numbers up to the largest label."""
        return class_names_of(dataset, columns[0], config)

    def values(self, dataset: Any, columns: Columns) -> Values:
        """Return the class index of every row as an array; -1 if there is none."""
        return read_labels(dataset, columns.names[0], columns.class_names)

    def read(self, row: Mapping[str, Any], columns: Columns) -> int:
        """Return the class index; raise UserError if it is outside the classes."""
        label = row[columns.names[0]]
        if not isinstance(label, int) or not 0 <= label < len(columns.class_names):
            raise UserError(f"data.source: an image has label {label}, outside 0..{len(columns.class_names) - 1}")
        return label

    def move(self, value: Any, geometry: Geometry) -> Any:
        """Return the class unchanged."""
        return value

    def collate(self, values: Sequence[Any], memory: Arrays) -> Collated:
        """Return the labels."""
        return {"label": np.array([0 if value is None else value for value in values], np.int64)}, []

    def slot(self, size: tuple[int, int]) -> dict[str, SlotSpec]:
        """Return no arrays: labels are small enough to be sent."""
        return {}


@dataclass(frozen=True)
class TextTarget:
    """Captions: `Batch.texts` has all captions of each image, none for missing images."""

    column: str | None = None
    """Column of the captions, strings or lists of strings; None: a column named `text`, `caption` or similar."""
    kind = "captions"
    is_spatial = False

    def find(self, features: Mapping[str, Any], config: DataConfig) -> tuple[str, ...]:
        """Return the caption column."""
        texts = {name: value for name, value in features.items() if getattr(element(value), "dtype", "") == "string"}
        return (find_column(features, texts, self.column, _TEXT_NAMES, "caption", config),)

    def class_names(self, dataset: Any, columns: tuple[str, ...], config: DataConfig) -> tuple[str, ...]:
        """Return no names."""
        return ()

    def values(self, dataset: Any, columns: Columns) -> Values:
        """Return the captions, read on demand."""
        return TableRows(dataset, columns, self)

    def read(self, row: Mapping[str, Any], columns: Columns) -> list[str]:
        """Return all captions of the image."""
        stored = row[columns.names[0]]
        captions = [stored] if isinstance(stored, str) else list(stored or [])
        if not all(isinstance(caption, str) for caption in captions):
            raise UserError(f"data.source: column {columns.names[0]} has values that are not text")
        return captions

    def move(self, value: Any, geometry: Geometry) -> Any:
        """Return the captions unchanged."""
        return value

    def collate(self, values: Sequence[Any], memory: Arrays) -> Collated:
        """Return the captions."""
        return {}, [value or [] for value in values]

    def slot(self, size: tuple[int, int]) -> dict[str, SlotSpec]:
        """Return no arrays."""
        return {}


@dataclass(frozen=True)
class NoValues(Sequence[None]):
    """None for every row of a table."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: Any) -> Any:
        return None


@dataclass(frozen=True)
class TableRows(Sequence[Any]):
    """Target values of a table, read row by row on demand."""

    dataset: Any
    columns: Columns
    target: Target

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: Any) -> Any:
        return self.target.read(self._rows[int(row)], self.columns)

    @cached_property
    def _rows(self) -> Any:
        import datasets

        rows = self.dataset.select_columns(list(self.columns.names))
        for name, feature in rows.features.items():
            if isinstance(feature, datasets.Image):
                rows = rows.cast_column(name, datasets.Image(decode=False))
        return rows


def check_transform(target: Target, transform: TrainTransform) -> None:
    """Raise UserError if RandAugment would move pixels but not the target."""
    augment = transform.rand_augment
    if not target.is_spatial or augment is None or not augment.moving:
        return
    options = transform.augment
    spec = (
        f"rand_augment={options.rand_augment}" if options.rand_augment else f"rand_magnitude={options.rand_magnitude}"
    )
    raise UserError(
        f"augment.{spec}: {', '.join(augment.moving)} move pixels but not {target.kind}; "
        "use augment.rand_augment=rand-t3a (color operations only), or disable RandAugment"
    )


def element(feature: Any) -> Any:
    """Return the feature of the elements of a list, or the feature itself."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return feature
