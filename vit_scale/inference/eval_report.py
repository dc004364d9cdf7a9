"""The results of launch/eval.py, on the terminal and as files. Knows any task's metrics, tables and images."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

from vit_scale.format import percent
from vit_scale.record.terminal import make_console, make_table
from vit_scale.tasks.task import Metric, Table

MAX_ROWS = 20
"""Tables up to this many rows are printed in full, otherwise the rows with the lowest values."""


class ReportShow:
    """`tasks.task.Show` that keeps tables and images until they are written; on the main process only."""

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self.model, self._enabled = model, enabled
        self.tables: list[Table] = []
        self.images: dict[str, Callable[[], Image.Image]] = {}

    def table(self, table: Table) -> None:
        if self._enabled:
            self.tables.append(table)

    def image(self, name: str, draw: Callable[[], Image.Image], *, title: str, caption: str) -> None:
        if self._enabled:
            self.images[name] = draw

    def info(self, text: str) -> None:
        if self._enabled:
            print(text)


@dataclass(frozen=True)
class Evaluation:
    """Results over all processes."""

    task_metrics: tuple[Metric, ...]
    metrics: dict[str, float]
    numbers: dict[str, Any]
    """Further results, such as `images` and `calibration_error`."""
    notes: dict[str, str]
    """Further lines for the terminal."""
    seconds: float
    show: ReportShow

    @property
    def images(self) -> int:
        """Images evaluated."""
        return int(self.numbers.get("images", 0))

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


def print_evaluation(evaluation: Evaluation, about: dict[str, str]) -> None:
    """Print what was evaluated, the metrics, and the tables (the weakest rows of a long one)."""
    console = make_console()
    rows = {
        **about,
        **{metric.label: _precise(metric, evaluation.metrics[metric.name]) for metric in evaluation.task_metrics},
        **evaluation.notes,
        "speed": f"{evaluation.images_per_second:,.1f} images/s, including data loading",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        console.print(f"{name:<{width}}  {value}", soft_wrap=True)
    for table in evaluation.show.tables:
        if not table.matrix:
            console.print()
            console.print(_printed(table))


def _precise(metric: Metric, value: float) -> str:
    return percent(value, 3) if metric.percent else metric.text(value)


def _printed(table: Table) -> Any:
    """Return the table for the terminal; rows without any value in the `weakest` column are left out."""
    rows, title = table.rows, None
    if table.weakest:
        column = table.columns.index(table.weakest)
        rows = [row for row in rows if row[column] is not None]
        if len(rows) > MAX_ROWS:
            title = f"{table.title}: the {MAX_ROWS} weakest of {len(rows):,}"
            rows = sorted(rows, key=lambda row: row[column])
    printed = make_table(*(name.replace("_", " ") for name in table.columns), title=title)
    for row in rows[:MAX_ROWS]:
        printed.add_row(*map(_cell, row))
    return printed


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return percent(value, 1)
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def to_json(evaluation: Evaluation, about: dict[str, str]) -> str:
    """Return everything except images and matrices as JSON."""
    tables = {
        table.name: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        for table in evaluation.show.tables
        if not table.matrix
    }
    speed = {"images_per_second": evaluation.images_per_second}
    return json.dumps({**about, **evaluation.metrics, **evaluation.numbers, **speed, **tables}, indent=1) + "\n"


def write_files(evaluation: Evaluation, about: dict[str, str], folder: Path) -> list[str]:
    """Write metrics.json, a CSV per table and a PNG per image; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(to_json(evaluation, about))
    names = ["metrics.json"]
    for table in evaluation.show.tables:
        _write_csv(folder / f"{table.name}.csv", table)
        names.append(f"{table.name}.csv")
    for name, draw in evaluation.show.images.items():
        draw().save(folder / f"{name}.png")
        names.append(f"{name}.png")
    return names


def _write_csv(path: Path, table: Table) -> None:
    heading: Sequence[Any] = table.columns
    rows: Sequence[Sequence[Any]] = table.rows
    if table.matrix:
        heading = ["true \\ predicted", *table.columns]
        rows = [[name, *row] for name, row in zip(table.columns, table.rows, strict=True)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([heading, *rows])
