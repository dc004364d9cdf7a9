"""Which classes are confused with which, counted over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from vit_scale.tasks.task import Table

MAX_CLASSES = 100
"""Up to this many classes a run shows the full matrix, otherwise the most frequent errors."""
MAX_PAIRS = 200


class Confusion:
    """Collects true and predicted classes of an evaluation, on the device. Only cells that occur are counted."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._cells: list[torch.Tensor] = []

    def add(self, labels: torch.Tensor, predicted: torch.Tensor, real: torch.Tensor) -> None:
        """Add a batch; `real` is False for padding."""
        self._cells.append(torch.where(real, labels * self.classes + predicted, -1))

    def counts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return true classes, predicted classes and how often each pair occurs; every rank must call it."""
        cells, counts = _sum_over_ranks(torch.cat(self._cells).cpu())
        return cells // self.classes, cells % self.classes, counts

    def matrix(self) -> torch.Tensor:
        """Return int64 counts [true class, predicted class]; every rank must call it."""
        true, predicted, counts = self.counts()
        square = torch.zeros(self.classes, self.classes, dtype=torch.int64)
        square[true, predicted] = counts
        return square


def confusion_table(confusion: Confusion, names: tuple[str, ...]) -> Table:
    """Return the matrix, or the most frequent errors if there are many classes; every rank must call it."""
    if confusion.classes <= MAX_CLASSES:
        return Table("confusion", "Confusion matrix", list(names), confusion.matrix().tolist(), matrix=True)
    true, predicted, counts = confusion.counts()
    wrong = true != predicted
    order = counts[wrong].argsort(descending=True, stable=True)[:MAX_PAIRS]
    columns = (column[wrong][order].tolist() for column in (true, predicted, counts))
    rows: list[list[object]] = [[names[i], names[j], count] for i, j, count in zip(*columns, strict=True)]
    return Table("confusion", "Most frequent errors", ["true", "predicted", "images"], rows)


def _sum_over_ranks(cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cells that occur and how often, over all ranks."""
    own = torch.unique(cells[cells >= 0], return_counts=True)
    if not dist.is_initialized():
        return own
    gathered: list[tuple[torch.Tensor, torch.Tensor]] = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    found, where = torch.unique(torch.cat([part[0] for part in gathered]), return_inverse=True)
    counts = torch.zeros_like(found).scatter_add_(0, where, torch.cat([part[1] for part in gathered]))
    return found, counts
