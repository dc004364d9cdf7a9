"""How sparse attention groups the patches of an image. Nothing here imports torch.

Every group is the product of a set of rows and a set of columns, so each axis is grouped on its own. A patch attends
to the patches of its group; each patch is in exactly one group.
"""

from __future__ import annotations

from typing import NamedTuple

Grid = tuple[int, int]
"""Rows and columns of patches."""


class Run(NamedTuple):
    """Equal groups along one axis, side by side: `groups` of `size` coordinates each, from `start` on."""

    start: int
    groups: int
    size: int
    dilation: int = 1
    """Distance between the coordinates of a group; as many groups are interleaved."""

    def coordinates(self) -> list[list[int]]:
        """Return the coordinates of each group."""
        span = self.size * self.dilation
        firsts = [self.start + i // self.dilation * span + i % self.dilation for i in range(self.groups)]
        return [list(range(first, first + span, self.dilation)) for first in firsts]


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

    def runs(self, grid: Grid) -> tuple[list[Run], list[Run]]:
        """Return the groups of rows and the groups of columns."""
        rows, columns = grid
        return self._along(rows), [Run(0, 1, columns)] if self.bands else self._along(columns)

    def sizes(self, grid: Grid) -> dict[int, int]:
        """Return the number of groups by number of patches per group."""
        rows, columns = self.runs(grid)
        found: dict[int, int] = {}
        for r in rows:
            for c in columns:
                found[r.size * c.size] = found.get(r.size * c.size, 0) + r.groups * c.groups
        return found

    def is_one_group(self, grid: Grid) -> bool:
        """Return whether all patches are in one group: attention is full."""
        return self.sizes(grid) == {grid[0] * grid[1]: 1}

    def groups(self, grid: Grid) -> list[list[int]]:
        """Return the patches of each group, numbered in raster order."""
        rows, columns = ([group for run in runs for group in run.coordinates()] for runs in self.runs(grid))
        return [[i * grid[1] + j for i in r for j in c] for r in rows for c in columns]

    def fits(self, grid: Grid) -> bool:
        """Return whether groups of this size divide the grid."""
        step = (self.window or 1) * (self.dilation or 1)
        return not any(length % step for length in (grid[:1] if self.bands else grid))

    def _along(self, length: int) -> list[Run]:
        dilation = self.dilation or 1
        size = self.window or length // dilation
        groups = length // size
        if not self.shifted or groups == 1:
            return [Run(0, groups, size, dilation)]
        first = size // 2
        runs = [Run(0, 1, first), Run(first, groups - 1, size), Run(length - size + first, 1, size - first)]
        return [run for run in runs if run.size]
