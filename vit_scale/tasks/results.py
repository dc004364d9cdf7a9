"""Metrics and tables that an evaluation reports. Imports no torch: the page reads them from run directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vit_scale.format import percent


@dataclass(frozen=True)
class Metric:
    """A number that evaluation reports, under `val/<name>`."""

    name: str
    label: str
    """Short name, for the terminal."""
    higher: bool = True
    """Whether higher is better."""
    percent: bool = True
    """Whether it is a fraction of 1, shown as a percentage."""
    brief: bool = True
    """Whether it is part of the one-line summary in the terminal."""
    shown: bool = True
    """Whether people are shown it; it is logged either way. False if it means nothing for the data of a run."""
    title: str = ""
    """Name on the page and in model cards, such as `Top-1 accuracy`; by default the label."""

    @property
    def heading(self) -> str:
        """Name on the page and in model cards."""
        return self.title or self.label

    def text(self, value: float) -> str:
        """Format a value."""
        return percent(value) if self.percent else f"{value:.4f}"

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether `value` beats `best`; any number beats None, NaN beats nothing."""
        if best is None:
            return value == value
        return value > best if self.higher else value < best

    def best_of(self, values: Sequence[float]) -> float:
        """Return the best of some values; NaN only if all are."""
        numbers = [value for value in values if value == value] or list(values)
        return max(numbers) if self.higher else min(numbers)


@dataclass(frozen=True)
class Table:
    """Rows that a run shows: `tables/<name>.json`, a W&B table, a table on the page."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[Any]]
    matrix: bool = False
    """Whether it is a confusion matrix: square, rows are true classes, columns predictions. Shown as a heat map."""
    weakest: str = ""
    """Column whose lowest values are printed if the table is too long for a terminal."""
    percent: list[str] = field(default_factory=list)
    """Columns with fractions of 1, shown as percentages."""

    def headings(self) -> list[str]:
        """Return the column names as people read them."""
        return [name.replace("_", " ") for name in self.columns]

    def texts(self, row: Sequence[Any]) -> list[str]:
        """Format the cells of a row."""
        return [self._text(name, value) for name, value in zip(self.columns, row, strict=True)]

    def _text(self, column: str, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, float):
            return percent(value, 1) if column in self.percent else f"{value:.4g}"
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
