"""What charts.js draws: line charts, scatter plots and confusion matrices, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# At least 3:1 against the light and the dark background, and distinguishable for color-blind readers in this order.
COLORS = ("#3d7fe0", "#db6a1e", "#1f9a74", "#b65fd0", "#d8475f", "#8c892a", "#1a93a8", "#a2704c")
MAX_NAMED_CLASSES = 20
"""Up to this many classes, a matrix names its classes and writes counts into its cells."""


@dataclass(frozen=True)
class Series:
    """One curve, or a set of points, of a figure."""

    name: str
    x: dict[str, list[float | None]]
    """Axis -> positions; None if a point has no position on that axis."""
    y: list[float | None]
    """None is a gap."""
    color: str
    style: str = "line"
    """`line`; `points` and `ema` also have markers; `stairs` is piecewise constant; `scatter` has markers only."""
    dash: str = ""
    """SVG's dash pattern, such as `6 3`."""
    smooth: bool = False
    """Whether the reader may smooth it."""
    run: int = 0
    """The run that it belongs to, which the reader may hide."""
    key: str = ""
    """Its key in metrics.jsonl."""
    texts: list[list[str]] = field(default_factory=list)
    """Lines that describe each point, if the figure shows one point at a time."""


def line_figure(
    series: Sequence[Series],
    axes: dict[str, str],
    *,
    number_format: str = "number",
    from_zero: bool = False,
    log_x: bool = False,
    categories: Sequence[str] | None = None,
    by_point: bool = False,
) -> dict[str, Any]:
    """Return a figure of curves or points.

    `axes` are the horizontal axes and their titles. `number_format` is `number` (4 significant digits), `fixed`
    (4 decimals) or `percent`. With `categories`, positions are their indices. `by_point` shows the texts of the
    point under the cursor instead of the values of all curves.
    """
    return {
        "kind": "lines",
        "axes": axes,
        "format": number_format,
        "fromZero": from_zero,
        "pad": by_point,
        "hover": "point" if by_point else "x",
        "x": {"log": log_x, "categories": list(categories) if categories is not None else None},
        "series": [vars(each) for each in series],
    }


def matrix_figure(classes: Sequence[str], counts: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return a confusion matrix: rows are true classes, columns predictions. Cells that never occur are omitted."""
    cells = [[i, j, count] for i, row in enumerate(counts) for j, count in enumerate(row) if count]
    return {"kind": "matrix", "classes": list(classes), "cells": cells, "namesUpTo": MAX_NAMED_CLASSES}
