"""Tables on the page: confusion matrices as heat maps with their largest errors, other tables as rows."""

from __future__ import annotations

from vit_scale.tasks.results import Table

MAX_ROWS = 20
"""Rows of a table that the page shows."""
MAX_ERRORS = 12
"""Off-diagonal entries that are listed below a matrix."""
MAX_CLASSES_DRAWN = 200
"""Larger matrices have cells below two pixels; only their largest errors are listed."""


def numeric_columns(table: Table) -> list[bool]:
    """Return whether each column has numbers only, apart from empty cells."""
    columns = [[row[i] for row in table.rows if row[i] is not None] for i in range(len(table.columns))]
    return [bool(cells) and all(isinstance(cell, int | float) for cell in cells) for cells in columns]


def is_drawn(table: Table) -> bool:
    """Return whether a matrix is drawn as a heat map."""
    return table.matrix and len(table.columns) <= MAX_CLASSES_DRAWN


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
