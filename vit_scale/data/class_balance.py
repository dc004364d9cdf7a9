"""The order of training images that draws all classes equally often: `data.balance`.

Draw number t over all epochs is of class t mod C of the C classes that occur, its (t div C)-th image. A class goes
through all of its images in a shuffled order before it repeats one, and continues in the next epoch. Within an epoch
the draws are shuffled (`sampling.py`), so an epoch of n images has each class n / C times, up to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vit_scale.config import DataConfig
from vit_scale.data.batch import ImageSource
from vit_scale.data.draws import keys
from vit_scale.errors import UserError

Ints = npt.NDArray[np.int64]
_STREAM = 0x62616C616E
"""Separates these draws from other uses of (seed, position)."""


@dataclass(frozen=True, eq=False)
class ClassBalance:
    """Even draws of all classes; a pure function of the seed and the epoch."""

    images: Ints
    """Image indices, sorted by class."""
    starts: Ints
    """Where each class starts in `images`."""
    counts: Ints
    """Images per class."""

    @classmethod
    def of_labels(cls, labels: Ints) -> ClassBalance:
        """Return the even draws of images with these labels; classes without an image are left out."""
        _, counts = np.unique(labels, return_counts=True)
        return cls(np.argsort(labels, kind="stable"), np.cumsum(counts) - counts, counts)

    def draw(self, seed: int, draws: Ints) -> Ints:
        """Return the image of each of the consecutive draws with these numbers."""
        turn, chosen = np.divmod(draws, len(self.counts))
        cycle, place = np.divmod(turn, self.counts[chosen])
        # The rounds through a class that occur: a few for a large class, many for a tiny one.
        first, last = (np.zeros_like(self.counts) for _ in range(2))
        first[chosen[::-1]], last[chosen] = cycle[::-1], cycle
        order, offsets = self._shuffled(seed, first, last - first + 1)
        return order[offsets[chosen] + (cycle - first[chosen]) * self.counts[chosen] + place]

    def _shuffled(self, seed: int, first: Ints, rounds: Ints) -> tuple[Ints, Ints]:
        """Return `rounds` shuffled rounds through each class from round `first` on, and where each class starts."""
        sizes = rounds * self.counts
        offsets = np.cumsum(sizes) - sizes
        entry_class = np.repeat(np.arange(len(self.counts)), sizes)
        turn, place = np.divmod(np.arange(sizes.sum()) - offsets[entry_class], self.counts[entry_class])
        image = self.images[self.starts[entry_class] + place]
        number = (first[entry_class] + turn) * len(self.images) + image  # of the image in this round
        shuffled = np.lexsort((keys(seed, number, _STREAM), turn, entry_class))
        return image[shuffled], offsets


def class_balance(config: DataConfig, source: ImageSource) -> ClassBalance | None:
    """Return the even draws that `data.balance` requests; raise `UserError` if the images have no classes."""
    if not config.balance:
        return None
    labels = source.labels
    if labels is None:
        raise UserError("data.balance = true: the images of this task have no classes")
    return ClassBalance.of_labels(labels)
