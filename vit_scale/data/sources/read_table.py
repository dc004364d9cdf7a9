"""Read a csv, tsv, jsonl or parquet file into an arrow table, without guessing at file names and labels."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from typing import Any

from vit_scale.data.images.file_types import suffix_of
from vit_scale.errors import UserError, first_line

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")


def read_table(path: str, name: str) -> Any:
    """Return the table in the file at `path`; messages use `name`.

    Of csv files, only columns in which every value is written like a number become numbers: `007` stays text.
    """
    import pyarrow as pa
    import pyarrow.parquet

    suffix = suffix_of(os.path.basename(path))
    if suffix not in TABLE_SUFFIXES:
        raise UserError(f"{name}: expected a {', '.join(TABLE_SUFFIXES[:-1])} or {TABLE_SUFFIXES[-1]} file")
    try:
        if suffix == ".parquet":
            table = pa.parquet.read_table(path)
        else:
            table = _read_jsonl(path) if suffix == ".jsonl" else _read_csv(path, name, suffix)
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{name}: cannot be read: {first_line(error)}") from error
    repeated = sorted({column for column in table.column_names if table.column_names.count(column) > 1})
    if repeated:
        raise UserError(f"{name}: has several columns named {', '.join(repeated)}")
    return table


def as_text(column: Any) -> Any:
    """Return a column of text, without surrounding spaces; empty text is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    return pc.if_else(pc.equal(text, ""), None, text)


def as_integers(column: Any) -> Any | None:
    """Return a column of integers; None if a value is none, or is written in another way than a number is printed."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_integer(column.type):
        return column.cast(pa.int64())
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    elif not _is_text(column.type):
        return None
    try:
        numbers = column.cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    if _is_text(column.type) and pc.any(pc.not_equal(numbers.cast(column.type), column)).as_py():
        return None
    return numbers


def find_name(candidates: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the first candidate among the columns; capitals make no difference."""
    by_lower = {column.lower(): column for column in reversed(columns)}
    return next((by_lower[name] for name in candidates if name in by_lower), None)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _read_csv(path: str, name: str, suffix: str) -> Any:
    import pyarrow as pa
    import pyarrow.csv

    with open(path, encoding="utf-8-sig", newline="") as file:
        first = file.readline()
    delimiter = "\t" if suffix == ".tsv" else max(",;\t", key=first.count)
    header = [column.strip() for column in next(csv.reader([first], delimiter=delimiter), [])]
    if not header:
        raise UserError(f"{name}: is empty; expected a first line with the names of the columns")
    if len(set(header)) < len(header):
        raise UserError(f"{name}: has several columns with the same name in its first line: {', '.join(header)}")
    table = pa.csv.read_csv(
        path,
        read_options=pa.csv.ReadOptions(column_names=header, skip_rows=1, block_size=1 << 24),
        parse_options=pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()), null_values=[""], strings_can_be_null=True
        ),
    )
    return pa.table({column: _as_numbers(as_text(table[column])) for column in header})


def _as_numbers(column: Any) -> Any:
    """Return a column of text as numbers, if all values are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    integers = as_integers(column)
    if integers is not None and integers.null_count < len(integers):
        return integers
    is_decimal = pc.match_substring_regex(column, r"^-?\d+\.\d+([eE][+-]?\d+)?$")
    return column.cast(pa.float64()) if pc.all(is_decimal).as_py() and column.null_count < len(column) else column


def _read_jsonl(path: str) -> Any:
    import pyarrow as pa
    import pyarrow.json

    # One block: rows may be longer than the default of 1 MB.
    block = min(2**31 - 1, max(1 << 20, os.path.getsize(path) + 1))
    return pa.json.read_json(path, read_options=pa.json.ReadOptions(block_size=block))
