"""Which classes are taken for which, counted over all processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

MOST_CLASSES = 100
"""Up to here the whole matrix is kept; beyond, the pairs that are confused most."""
MOST_PAIRS = 200


@dataclass(frozen=True)
class ConfusionTable:
    """The content of confusion.json: `counts` (rows true, columns predicted), or `pairs` where classes are many."""

    step: int
    weights: str
    """`raw` or `ema`."""
    classes: list[str]
    counts: list[list[int]] | None
    pairs: list[tuple[int, int, int]]
    """True class, predicted class, images; the most frequent first, only mistakes."""

    def to_dict(self) -> dict[str, Any]:
        """As it is written: the pairs follow from the counts, so one of them is enough."""
        head = {"step": self.step, "weights": self.weights, "classes": self.classes}
        return head | ({"pairs": self.pairs} if self.counts is None else {"counts": self.counts})


class Confusion:
    """Collects true and predicted classes of an evaluation, on the device."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._cells: list[torch.Tensor] = []

    def add(self, labels: torch.Tensor, predicted: torch.Tensor, real: torch.Tensor) -> None:
        """A batch; `real` is false for padding."""
        self._cells.append(torch.where(real, labels * self.classes + predicted, -1))

    def table(self, step: int, weights: str, names: list[str]) -> ConfusionTable:
        """The sums over all processes; all must call it."""
        cells, counts = _summed(torch.cat(self._cells).cpu())
        true, predicted = cells // self.classes, cells % self.classes
        matrix = None
        if self.classes <= MOST_CLASSES:
            square = torch.zeros(self.classes, self.classes, dtype=torch.int64)
            square[true, predicted] = counts
            matrix = square.tolist()
        wrong = true != predicted
        order = counts[wrong].argsort(descending=True, stable=True)[:MOST_PAIRS]
        columns = (column[wrong][order].tolist() for column in (true, predicted, counts))
        classes = [names[i] if i < len(names) else str(i) for i in range(self.classes)]
        return ConfusionTable(step, weights, classes, matrix, list(zip(*columns, strict=True)))


def _summed(cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Different cells and how often each occurs, over all processes."""
    own = torch.unique(cells[cells >= 0], return_counts=True)
    if not dist.is_initialized():
        return own
    everyone: list[tuple[torch.Tensor, torch.Tensor]] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found, where = torch.unique(torch.cat([part[0] for part in everyone]), return_inverse=True)
    counts = torch.zeros_like(found).scatter_add_(0, where, torch.cat([part[1] for part in everyone]))
    return found, counts
