"""Tables on the page: confusion matrices as heat maps with their largest errors, other tables as rows."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

from vit_scale.format import percent
from vit_scale.tasks.results import Table

if TYPE_CHECKING:
    import plotly.graph_objects as go

MAX_ROWS = 20
"""Rows of a table that the page shows."""
MAX_ERRORS = 12
"""Off-diagonal entries that are listed below a matrix."""
MAX_CLASSES_WITH_COUNTS = 20
"""Up to this many classes, cells are large enough for their counts."""


def numeric_columns(table: Table) -> list[bool]:
    """Return whether each column has numbers only, apart from empty cells."""
    columns = [[row[i] for row in table.rows if row[i] is not None] for i in range(len(table.columns))]
    return [bool(cells) and all(isinstance(cell, int | float) for cell in cells) for cells in columns]


def largest_errors(table: Table) -> Table:
    """Return the largest off-diagonal entries of a matrix."""
    names = table.columns
    errors = [
        [names[i], names[j], count]
        for i, row in enumerate(table.rows)
        for j, count in enumerate(row)
        if i != j and count
    ]
    errors.sort(key=lambda error: -error[2])
    return Table("errors", "Most frequent errors", ["true", "predicted", "count"], errors[:MAX_ERRORS])


def matrix_figure(table: Table) -> go.Figure:
    """Return a heat map of the fractions of each row; errors are negative, which gives them another color."""
    import plotly.graph_objects as go

    classes, counts = [html.escape(name) for name in table.columns], table.rows
    few = len(classes) <= MAX_CLASSES_WITH_COUNTS
    heat = go.Heatmap(
        z=[[_shade(count / max(1, sum(row)), i == j) for j, count in enumerate(row)] for i, row in enumerate(counts)],
        customdata=counts,
        hovertext=_hover_texts(classes, counts),
        hovertemplate="%{hovertext}<extra></extra>",
        text=[[f"{count:,}" if count else "" for count in row] for row in counts] if few else None,
        texttemplate="%{text}" if few else None,
        zmin=-1,
        zmax=1,
        xgap=1 if few else 0,
        ygap=1 if few else 0,
        showscale=False,
    )
    figure = go.Figure(heat, layout={"template": "none"})
    ticks = {"tickvals": list(range(len(classes))), "ticktext": classes} if few else {"showticklabels": False}
    figure.update_xaxes(title_text="predicted", constrain="domain", ticks="", **ticks)
    figure.update_yaxes(title_text="true", autorange="reversed", scaleanchor="x", constrain="domain", ticks="", **ticks)
    return figure


def _shade(fraction: float, correct: bool) -> float:
    """Return the value to color; the square root makes an error of 1% visible."""
    return fraction if correct else -math.sqrt(fraction)


def _hover_texts(classes: list[str], counts: list[list[float]]) -> list[list[str]]:
    """Return `2 of 37 (5.4%): 9 classified as 1` for every cell."""
    return [
        [
            f"{count:,} of {sum(row):,} ({percent(count / max(1, sum(row)), 1)}): {true} "
            + ("classified correctly" if i == j else f"classified as {classes[j]}")
            for j, count in enumerate(row)
        ]
        for i, (true, row) in enumerate(zip(classes, counts, strict=True))
    ]
