"""Images of a directory with labels (or captions, masks, ...) from tables.

A table is `data.labels`, or by the convention of the Hugging Face Hub each `metadata.csv`, `.jsonl` or `.parquet` in
the directory or below it. It has a row per image: the file, and further columns that become columns of the dataset.
Files in a column `mask_file_name` become an image column `mask`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vit_scale.config import DataConfig
from vit_scale.data.images.file_types import UNSUPPORTED_SUFFIXES, suffix_of
from vit_scale.data.sources.columns import LABEL_NAMES
from vit_scale.data.sources.image_folder import Layout, find_layout
from vit_scale.data.sources.image_table import image_column, make_dataset
from vit_scale.data.sources.read_table import TABLE_SUFFIXES, as_integers, as_text, find_name, read_table
from vit_scale.data.sources.scan import Scan, describe_skipped, describe_unreadable
from vit_scale.errors import UserError, nearest
from vit_scale.format import counted, printable, some

_FILE_NAMES = ["file_name", "filename", "file", "file_path", "filepath", "path", "image_path", "image_file", "image"]
_FILE_NAMES += ["image_file_name", "img", "image_name", "image_id", "id", "name"]
_OTHER_FILES = "_file_name"
_MAX_CLASS_INDEX = 1_000_000


@dataclass
class Rows:
    """The rows of all tables, and the images that they are about."""

    name: str
    """How messages name the tables."""
    columns: dict[str, Any]
    """Arrow columns other than the file."""
    images: list[str | None]
    """By row, the path of the image relative to the directory; None if there is none."""
    image_column: str
    """Name of the column of images."""
    other_images: set[str]
    """Paths in further columns of files."""


def read_labeled_folder(scan: Scan, config: DataConfig, *, needs_class: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the splits of a directory of images described by tables, and notes about what was skipped."""
    tables = [_locate_table(config.labels, scan)] if config.labels else scan.metadata
    _check_metadata(scan, config)
    files = _Files(scan)
    rows, notes = _read_rows(tables, files, config)
    layout = find_layout(scan, config, needs_class=False)
    features: dict[str, Any] = {}
    label = _label_column(rows, config) if needs_class else None
    if label is not None:
        rows.columns[label], features[label] = _as_classes(rows.columns[label], f"{rows.name}: column {label}")
    elif needs_class:
        label = _label_by_directory(rows, layout, features)
    if label is not None:
        notes += _drop_repeated(rows, label)
    chosen, skipped = _choose_rows(rows, layout, label)
    notes += skipped
    described = rows.other_images | {path for path in rows.images if path is not None}
    without_row = [path for path in files.paths if path not in described]
    if without_row:
        notes.append(f"{rows.name}: {counted(len(without_row), 'image')} without a row skipped: {some(without_row)}")
    others = [path for path in (*scan.others, *scan.metadata, *scan.parquet) if path not in tables]
    if text := describe_skipped(scan.unreadable, others):
        notes.append(f"{config.source}: {text}")
    splits = {split: _as_dataset(rows, numbers, scan, features) for split, numbers in chosen.items()}
    return splits, tuple(notes)


class _Files:
    """Finds the images that a table names."""

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self.paths = list(scan.paths())
        self.unsupported = [path for path, reason in scan.unreadable if reason in UNSUPPORTED_SUFFIXES]

    def find(self, values: Sequence[str | None], directory: str) -> list[str | None]:
        """Return the image of each value: by its path from `directory`, otherwise without suffix, otherwise by name.

        All values are read the same way: the first way that finds all of them, or the most.
        """
        best: list[str | None] = []
        for keys, key in self._ways(directory):
            found = [None if value is None else keys.get(key(value)) for value in values]
            if not best or found.count(None) < best.count(None):
                best = found
            if best.count(None) == values.count(None):
                break
        return best

    def _ways(self, directory: str) -> Any:
        def path(value: str) -> str:
            return self._relative(value, directory)

        yield self._exact, path
        yield _unique(self.paths, _stem), path
        yield _unique(self.paths, os.path.basename), os.path.basename
        yield _unique(self.paths, lambda each: _stem(os.path.basename(each))), os.path.basename

    def _relative(self, value: str, directory: str) -> str:
        """Return a path relative to the scanned directory, from one relative to `directory` below it or absolute."""
        path = value.replace("\\", "/") if "\\" in value and value not in self._exact else value
        if os.path.isabs(path):
            return os.path.relpath(path, self.scan.root)
        return os.path.normpath(os.path.join(directory, path))

    @cached_property
    def _exact(self) -> dict[str, str]:
        return {path: path for path in self.paths}


def _stem(path: str) -> str:
    return path.removesuffix(os.path.splitext(path)[1])


def _unique(paths: Sequence[str], key: Callable[[str], str]) -> dict[str, str]:
    """Return paths by key, without those whose key is not unique."""
    found: dict[str, str] = {}
    repeated = set()
    for path in paths:
        if found.setdefault(key(path), path) != path:
            repeated.add(key(path))
    return {name: path for name, path in found.items() if name not in repeated}


def _locate_table(labels: str, scan: Scan) -> str:
    """Return the path of `data.labels`, relative to the directory if it is inside."""
    for directory in (Path(scan.root), Path.cwd()):
        path = directory / Path(labels).expanduser()
        if path.is_file():
            resolved = str(path.resolve())
            return os.path.relpath(resolved, scan.root) if resolved.startswith(f"{scan.root}/") else resolved
    found = [path for path in (*scan.others, *scan.metadata, *scan.parquet) if suffix_of(path) in TABLE_SUFFIXES]
    near = nearest(labels, found) or found[:1]
    hint = f"; found there: {near[0]}" if near else ""
    raise UserError(f"data.labels={labels}: file not found in {scan.root} or in the working directory{hint}")


def _check_metadata(scan: Scan, config: DataConfig) -> None:
    """Raise UserError for several metadata files in one directory, which would describe its images twice."""
    by_directory = {os.path.dirname(path): path for path in reversed(scan.metadata)}
    for path in scan.metadata:
        if not config.labels and (other := by_directory[os.path.dirname(path)]) != path:
            raise UserError(
                f"data.source={scan.root}: has both {other} and {path}; move one, or set data.labels to one of them"
            )


def _read_rows(tables: Sequence[str], files: _Files, config: DataConfig) -> tuple[Rows, list[str]]:
    """Read all tables, and find the images of their rows."""
    import pyarrow as pa

    name = f"data.labels={config.labels}" if config.labels else f"{config.source}: {some(tables)}"
    read: list[Any] = []
    images: list[str | None] = []
    missing: list[str] = []
    others: set[str] = set()
    for path in tables:
        where = f"data.labels={config.labels}" if config.labels else f"{config.source}: {path}"
        table = read_table(os.path.join(files.scan.root, path), where)
        column = _file_column(table.column_names, where, config)
        directory = "" if config.labels else os.path.dirname(path)
        values = as_text(table[column]).to_pylist()
        found = files.find(values, directory)
        missing += [f"row {i + 1}" if v is None else v for i, v in enumerate(values) if found[i] is None]
        images += found
        table = table.drop_columns([column])
        for extra in [each for each in table.column_names if each.endswith(_OTHER_FILES)]:
            paths = _find_others(as_text(table[extra]).to_pylist(), directory, files, f"{where}: column {extra}")
            others.update(path for path in paths if path)
            table = table.drop_columns([extra]).append_column(
                extra.removesuffix(_OTHER_FILES), image_column([path and f"{files.scan.root}/{path}" for path in paths])
            )
        read.append(table)
    notes = _report_missing(missing, len(images), name, files, config)
    try:
        joined = pa.concat_tables(read, promote_options="default")
    except pa.ArrowException as error:
        raise UserError(f"{name}: columns of these tables differ in type: {error}") from error
    taken = joined.column_names
    image = (
        config.image_column if config.labels and config.image_column else "image" if "image" not in taken else column
    )
    return Rows(name, {each: joined[each] for each in taken}, images, image, others), notes


def _file_column(columns: Sequence[str], where: str, config: DataConfig) -> str:
    if config.labels and config.image_column is not None:
        if config.image_column not in columns:
            raise UserError(f"data.image_column={config.image_column}: column not found in {where}; {_list(columns)}")
        return config.image_column
    names = _FILE_NAMES if config.labels else ("file_name", "image_file_name")
    found = find_name(names, columns)
    if found is None and config.labels:
        raise UserError(f"{where}: no column of files; {_list(columns)}; choose one with data.image_column")
    if found is None:
        raise UserError(
            f"{where}: no column file_name; {_list(columns)}; rename the column of files, or rename the file "
            "if it does not describe images"
        )
    return found


def _list(columns: Sequence[str]) -> str:
    return f"its columns are {some(columns, 10)}"


def _find_others(values: Sequence[str | None], directory: str, files: _Files, where: str) -> list[str | None]:
    """Return the files of a further column of images; empty values are allowed."""
    found = files.find(values, directory)
    lost = [value for value, path in zip(values, found, strict=True) if value is not None and path is None]
    if lost:
        raise UserError(f"{where}: {len(lost):,} of {len(values):,} files not found: {some(lost)}")
    return found


def _report_missing(missing: Sequence[str], count: int, name: str, files: _Files, config: DataConfig) -> list[str]:
    """Raise UserError for rows whose files were not found, or return a note with `data.on_error=skip`."""
    if not missing:
        return []
    names = {os.path.basename(value) for value in missing}
    stems = {_stem(value) for value in names}
    unsupported = [
        path for path in files.unsupported if os.path.basename(path) in names or _stem(os.path.basename(path)) in stems
    ]
    reasons = describe_unreadable([(path, suffix_of(path)) for path in unsupported])
    names_of_files = Counter(
        name for path in files.paths for name in (os.path.basename(path), _stem(os.path.basename(path)))
    )
    if repeated := [value for value in missing if names_of_files[os.path.basename(value)] > 1]:
        reasons.append(f"{len(repeated):,} fit several files: their directories are needed")
    why = f" ({', '.join(reasons)})" if reasons else ""
    text = f"{name}: {len(missing):,} of {count:,} files not found in {config.source}{why}: {some(missing)}"
    if config.on_error == "raise" or len(missing) == count:
        advice = (
            "set data.on_error=skip to skip these rows"
            if len(missing) < count
            else ("files are relative to data.source; choose another column with data.image_column")
        )
        raise UserError(f"{text}; {advice}")
    return [f"{text}; these rows are skipped"]


def _label_column(rows: Rows, config: DataConfig) -> str | None:
    """Return the column of labels: the named one, one with a typical name, or the only one besides `split`."""
    import pyarrow as pa

    columns = list(rows.columns)
    if config.label_column is not None:
        if config.label_column in columns:
            return config.label_column
        if config.labels:
            raise UserError(
                f"data.label_column={config.label_column}: column not found in {rows.name}; {_list(columns)}"
            )
    plain = [name for name in columns if not pa.types.is_nested(rows.columns[name].type)]
    found = find_name(LABEL_NAMES, plain)
    if found is not None or not config.labels:
        return found
    rest = [name for name in plain if name.lower() != "split"]
    if len(rest) == 1:
        return rest[0]
    raise UserError(f"{rows.name}: no column of labels; {_list(columns)}; choose one with data.label_column")


def _as_classes(column: Any, where: str) -> tuple[Any, Any]:
    """Return a column of labels as class indices, and its feature."""
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc

    integers = as_integers(column)
    if integers is not None:
        top = pc.max(integers).as_py()
        if top is not None and top >= _MAX_CLASS_INDEX:
            raise UserError(f"{where}: has labels up to {top:,}; expected the class indices 0, 1, 2, ... or text")
        return integers, datasets.ClassLabel(names=[str(i) for i in range((top or 0) + 1)])
    kind = column.type
    if pa.types.is_floating(kind) or pa.types.is_nested(kind) or pa.types.is_binary(kind):
        raise UserError(f"{where}: labels have type {kind}; expected integers or text")
    text = as_text(column)
    names = sorted(name for name in pc.unique(text).to_pylist() if name is not None)
    return pc.index_in(text, pa.array(names, pa.string())).cast(pa.int64()), datasets.ClassLabel(
        names=names or ["none"]
    )


def _label_by_directory(rows: Rows, layout: Layout, features: dict[str, Any]) -> str | None:
    """Add the labels of metadata without a label column, from the class directories if there are several."""
    import datasets
    import pyarrow as pa

    if len(layout.names) < 2:
        return None
    numbers = {name: i for i, name in enumerate(layout.names)}
    places = [layout.place(os.path.dirname(path or "")) for path in rows.images]
    labels = pa.array([numbers.get(layout.class_of(place)) for place in places], pa.int64())
    rows.columns["label"], features["label"] = pa.chunked_array([labels]), datasets.ClassLabel(names=layout.names)
    return "label"


def _drop_repeated(rows: Rows, label: str) -> list[str]:
    """Drop rows that repeat an image with its label, which may end up in two splits; another label is an error."""
    labels = rows.columns[label].to_pylist()
    first: dict[str, int] = {}
    repeated = []
    for i, path in enumerate(rows.images):
        if path is None or first.setdefault(path, i) == i:
            continue
        if labels[i] != labels[first[path]]:
            where = f"rows {first[path] + 1:,} and {i + 1:,}"
            raise UserError(f"{rows.name}: {printable(path)} has two labels, in {where}; keep one of them")
        repeated.append(path)
        rows.images[i] = None
    return [f"{rows.name}: {counted(len(repeated), 'repeated row')} skipped: {some(repeated)}"] if repeated else []


def _choose_rows(rows: Rows, layout: Layout, label: str | None) -> tuple[dict[str, list[int]], list[str]]:
    """Return the rows of each split, and notes about those that are skipped."""
    count = len(rows.images)
    column = find_name(("split",), list(rows.columns))
    if column is not None:
        splits = [value and value.lower() for value in as_text(rows.columns.pop(column)).to_pylist()]
    else:
        splits = [layout.place(os.path.dirname(path or "")).split for path in rows.images]
    labels = rows.columns[label].to_pylist() if label is not None else [0] * count
    chosen: dict[str, list[int]] = {}
    unlabeled, outside = [], []
    for i, path in enumerate(rows.images):
        if path is None:
            continue
        if labels[i] is None:
            unlabeled.append(path)
        elif splits[i] is None:
            outside.append(path)
        else:
            chosen.setdefault(splits[i], []).append(i)
    notes = []
    for kind, skipped in (("label", unlabeled), ("split", outside)):
        if skipped:
            notes.append(f"{rows.name}: {counted(len(skipped), 'row')} without a {kind} skipped: {some(skipped)}")
    if not chosen:
        raise UserError(f"{rows.name}: has no row with {'a label' if unlabeled else 'an image'}")
    return chosen, notes


def _as_dataset(rows: Rows, numbers: list[int], scan: Scan, features: Mapping[str, Any]) -> Any:
    import datasets
    import pyarrow as pa

    take = pa.array(numbers, pa.int64())
    columns = {rows.image_column: image_column([f"{scan.root}/{rows.images[i]}" for i in numbers])}
    columns |= {name: column.take(take) for name, column in rows.columns.items() if name != rows.image_column}
    found = datasets.Features.from_arrow_schema(pa.schema([(name, each.type) for name, each in columns.items()]))
    images = {name: datasets.Image() for name, each in columns.items() if each.type == datasets.Image().pa_type}
    return make_dataset(columns, {**found, **images, **features})
