"""Images and targets of one split of a table, and the hold-out of a validation split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vit_scale.data.batch import Sample
from vit_scale.data.sources.columns import ImageColumn
from vit_scale.data.targets import Values

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """Images and targets of one split of a dataset. The table is a memory map that all processes share."""

    dataset: Any
    image_column: str
    table_targets: Values
    name: str
    rows: Ints | None = None
    """The rows of the table that belong to the split; None: all, in order."""

    def __len__(self) -> int:
        return len(self.table_targets if self.rows is None else self.rows)

    def read(self, index: int) -> Sample:
        """Return the stored image (bytes without a copy, a path, or pixels) and its target."""
        row = self._row(index)
        return Sample(self._images.read(row), self._target(row))

    def read_target(self, index: int) -> Any:
        """Return the target alone."""
        return self._target(self._row(index))

    def describe(self, index: int) -> str:
        """Name an image in messages: its file if known, and its row."""
        row = self._row(index)
        path = self._images.path(row)
        return f"{path} (row {row} of {self.name})" if path else f"row {row} of {self.name}"

    @property
    def labels(self) -> Ints | None:
        """Class indices of all images in the order of `read`; None if the target is not a class."""
        if not isinstance(self.table_targets, np.ndarray):
            return None
        return self.table_targets if self.rows is None else self.table_targets[self.rows]

    def subset(self, indices: Ints) -> Source:
        """Return the images at these indices of this source."""
        return replace(self, rows=indices if self.rows is None else self.rows[indices])

    def _row(self, index: int) -> int:
        return index if self.rows is None else int(self.rows[index])

    def _target(self, row: int) -> Any:
        value = self.table_targets[row]
        return int(value) if isinstance(value, np.integer) else value

    @cached_property
    def _images(self) -> ImageColumn:
        return ImageColumn(self.dataset, self.image_column)

    def __getstate__(self) -> dict[str, Any]:
        # Each process creates its own views into the memory map.
        return {key: value for key, value in self.__dict__.items() if key != "_images"}


def hold_out(source: Source, fraction: float) -> npt.NDArray[np.bool_]:
    """Return the mask of a hold-out: balanced if there are classes, otherwise random; the same for all seeds."""
    labels = source.labels
    return balanced_holdout(np.zeros(len(source), np.int64) if labels is None else labels, fraction)


def balanced_holdout(labels: Ints, fraction: float) -> npt.NDArray[np.bool_]:
    """Return the mask of a hold-out that has the same fraction of each class up to rounding, always the same images.

    Images are sorted by class, shuffled within it, and every k-th one is taken: rare classes share a fraction together.
    """
    n = len(labels)
    shuffled = np.random.default_rng(0).permutation(n)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    count = min(max(1, round(fraction * n)), n - 1)
    mask = np.zeros(n, dtype=bool)
    mask[by_class[((np.arange(count) + 0.5) * n / count).astype(np.int64)]] = True
    return mask
