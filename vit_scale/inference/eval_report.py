"""Print and write the results of launch/eval.py: metrics, tables and images of any task."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from torch import nn

from vit_scale.format import percent
from vit_scale.record.terminal import make_console, make_table
from vit_scale.tasks.results import Metric, Table

MAX_ROWS = 20
"""Longer tables are shortened in the terminal."""


class ReportShow:
    """`tasks.task.Show` that collects tables and images until they are written, on the main process."""

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
    """Further results, such as `calibration_error`."""
    notes: dict[str, str]
    """Further lines for the terminal."""
    images: int
    seconds: float
    show: ReportShow

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


def print_evaluation(evaluation: Evaluation, about: dict[str, str]) -> None:
    """Print what was evaluated, the metrics, and the tables (the weakest rows of a long one)."""
    console = make_console()
    rows = {
        **about,
        **{
            metric.label: _precise(metric, evaluation.metrics[metric.name])
            for metric in evaluation.task_metrics
            if metric.shown
        },
        **evaluation.notes,
        "speed": f"{evaluation.images_per_second:,.1f} images/s, including data loading",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        console.print(f"{name:<{width}}  {value}", soft_wrap=True)
    for table in evaluation.show.tables:
        if not table.matrix:
            _print_table(console, table)


def _precise(metric: Metric, value: float) -> str:
    return percent(value, 3) if metric.percent else metric.text(value)


def _print_table(console: Console, table: Table) -> None:
    """Print a table, shortened if it is long, without rows that have no value in the `weakest` column."""
    rows, title = table.rows, table.title
    if table.weakest:
        column = table.columns.index(table.weakest)
        rows = [row for row in rows if row[column] is not None]
        if len(rows) > MAX_ROWS:
            title = f"{table.title}: the {MAX_ROWS} weakest of {len(rows):,}"
            rows = sorted(rows, key=lambda row: row[column])
    elif len(rows) > MAX_ROWS:
        title = f"{table.title}: the first {MAX_ROWS} of {len(rows):,}"
    printed = make_table(*table.headings())
    for row in rows[:MAX_ROWS]:
        printed.add_row(*table.texts(row))
    # Not the title of the rich table, which would be wrapped to its width.
    console.print(f"\n{title}", style="bold", soft_wrap=True)
    console.print(printed)


def to_json(evaluation: Evaluation, about: dict[str, str]) -> str:
    """Return everything except images and matrices as JSON."""
    tables = {
        table.name: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        for table in evaluation.show.tables
        if not table.matrix
    }
    counted = {"images": evaluation.images, "images_per_second": evaluation.images_per_second}
    return json.dumps({**about, **evaluation.metrics, **evaluation.numbers, **counted, **tables}, indent=1) + "\n"


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
