"""How sparse attention groups the patches of an image. Nothing here imports torch.

Every group is the product of a set of rows and a set of columns, so each axis is grouped on its own. A patch attends
to the patches of its group; each patch is in exactly one group.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

Grid = tuple[int, int]
"""Rows and columns of patches."""


class Grouping(NamedTuple):
    """The groups of one block."""

    window: int | None
    """Coordinates per group and axis; None: as many as fit."""
    dilation: int | None = None
    """Distance between the coordinates of a group; None: 1."""
    shifted: bool = False
    """Groups begin half a window later, except if one group covers the axis; those at the border are cut."""
    bands: bool = False
    """Groups are bands of `window` complete rows."""

    def axes(self, grid: Grid) -> tuple[list[list[int]], list[list[int]]]:
        """Return the groups of row indices and the groups of column indices."""
        rows, columns = grid
        return self._along(rows), [list(range(columns))] if self.bands else self._along(columns)

    def sizes(self, grid: Grid) -> dict[int, int]:
        """Return the number of groups by number of patches per group."""
        rows, columns = self.axes(grid)
        return dict(Counter(len(r) * len(c) for r in rows for c in columns))

    def is_one_group(self, grid: Grid) -> bool:
        """Return whether all patches are in one group: attention is full."""
        return [len(axis) for axis in self.axes(grid)] == [1, 1]

    def by_shape(self, grid: Grid) -> list[list[list[int]]]:
        """Return the groups, each a list of patch indices in raster order, those of equal shape together."""
        rows, columns = self.axes(grid)
        found: dict[tuple[int, int], list[list[int]]] = {}
        for r in rows:
            for c in columns:
                found.setdefault((len(r), len(c)), []).append([i * grid[1] + j for i in r for j in c])
        return list(found.values())

    def fits(self, grid: Grid) -> bool:
        """Return whether groups of this size divide the grid."""
        step = (self.window or 1) * (self.dilation or 1)
        return not any(length % step for length in (grid[:1] if self.bands else grid))

    def _along(self, length: int) -> list[list[int]]:
        if self.dilation is not None:
            window = self.window or length // self.dilation
            span = window * self.dilation
            starts = [start + offset for start in range(0, length, span) for offset in range(self.dilation)]
            return [list(range(start, start + span, self.dilation)) for start in starts]
        assert self.window is not None
        shift = self.window // 2 if self.shifted and self.window < length else 0
        cuts = [*range(shift, length, self.window), length]
        cuts = cuts if cuts[0] == 0 else [0, *cuts]
        return [list(range(start, end)) for start, end in zip(cuts[:-1], cuts[1:], strict=True)]
