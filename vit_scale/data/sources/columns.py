"""Which columns of a dataset hold images and labels, and how to read them fast."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from vit_scale.config import DataConfig
from vit_scale.errors import UserError

_IMAGE_NAMES = ("image", "img", "pixel_values", "jpg", "png")
_LABEL_NAMES = ("label", "labels", "fine_label", "target", "class", "cls", "category", "y")


class ImageColumn:
    """Rows of an image column straight from the arrow buffers: `dataset[i]` takes some 50 times as long."""

    def __init__(self, dataset: Any, column: str):
        import datasets

        self._column = column
        self._arrays: Any = None
        self._indices: npt.NDArray[np.int64] | None = None
        if not isinstance(dataset.features[column], datasets.Image):
            self._arrays = dataset.select_columns([column]).with_format("numpy")
            return
        if dataset._indices is not None:
            self._indices = dataset._indices.column(0).to_numpy().astype(np.int64)
        chunks = dataset.data.column(column).chunks
        self._starts = list(accumulate((len(chunk) for chunk in chunks), initial=0))
        self._bytes = [chunk.field("bytes") for chunk in chunks]
        self._paths = [chunk.field("path") for chunk in chunks]

    def read(self, row: int) -> Any:
        """Bytes of the file (no copy), or its path where the table holds none, or pixels of an array column."""
        if self._arrays is not None:
            return self._arrays[row][self._column]
        chunk, place = self._locate(row)
        data = self._bytes[chunk][place].as_buffer()
        return data if data is not None else self._paths[chunk][place].as_py()

    def path(self, row: int) -> str | None:
        """Name of the file, where the table knows it."""
        if self._arrays is not None:
            return None
        chunk, place = self._locate(row)
        return self._paths[chunk][place].as_py()

    def _locate(self, row: int) -> tuple[int, int]:
        if self._indices is not None:
            row = int(self._indices[row])
        chunk = bisect_right(self._starts, row) - 1
        return chunk, row - self._starts[chunk]


def find_image_column(features: Mapping[str, Any], config: DataConfig) -> str:
    """The column named by the options, else the one with an image feature, else the one with an array feature."""
    import datasets

    if config.image_column is not None:
        return _named(config.image_column, features, "data.image_column")
    for kind in (datasets.Image, (datasets.Array2D, datasets.Array3D)):
        found = [name for name, feature in features.items() if isinstance(feature, kind)]
        if found:
            return _only(found, _IMAGE_NAMES, "data.image_column", config)
    raise UserError(
        f"data.source={config.source}: no column of images among {_list(features)}; name it in data.image_column"
    )


def find_label_column(features: Mapping[str, Any], config: DataConfig) -> str:
    """The column named by the options, else the one with a class-label feature, else one named like a label."""
    import datasets

    if config.label_column is not None:
        return _named(config.label_column, features, "data.label_column")
    found = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if found:
        return _only(found, _LABEL_NAMES, "data.label_column", config)
    for name in _LABEL_NAMES:
        if isinstance(features.get(name), datasets.Value):
            return name
    raise UserError(
        f"data.source={config.source}: no column of labels among {_list(features)}; name it in data.label_column, "
        "or put images into one folder for each class"
    )


def class_names_of(dataset: Any, column: str, config: DataConfig) -> tuple[str, ...]:
    """Names of the classes: the feature's own, a text column's sorted strings, or numbers up to the largest label."""
    feature = dataset.features[column]
    if hasattr(feature, "names"):
        return tuple(feature.names)
    values = np.unique(dataset.with_format("arrow")[:][column].drop_null().to_numpy(zero_copy_only=False))
    if len(values) == 0:
        raise UserError(f"data.label_column={column}: {config.source} has no labels there")
    if values.dtype.kind in "iu":
        return tuple(str(i) for i in range(int(values.max()) + 1))
    if values.dtype.kind in "OUT":
        return tuple(str(value) for value in values)
    raise UserError(f"data.label_column={column}: labels are of type {feature.dtype}; whole numbers or text are needed")


def read_labels(dataset: Any, column: str, names: tuple[str, ...], config: DataConfig) -> npt.NDArray[np.int64]:
    """Labels of all rows as numbers; -1 where there is none, or where a text is not among the names."""
    values = dataset.with_format("arrow")[:][column]
    if str(values.type) in ("string", "large_string"):
        number = {name: i for i, name in enumerate(names)}
        return np.array([number.get(value, -1) for value in values.to_pylist()], dtype=np.int64)
    return values.fill_null(-1).to_numpy().astype(np.int64)


def _named(name: str, features: Mapping[str, Any], key: str) -> str:
    if name not in features:
        raise UserError(f"{key}={name}: no such column; there are {_list(features)}")
    return name


def _only(found: list[str], preferred: Iterable[str], key: str, config: DataConfig) -> str:
    if len(found) == 1:
        return found[0]
    for name in preferred:
        if name in found:
            return name
    raise UserError(f"{key}: {config.source} has several candidates, {_list(found)}; choose one")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
