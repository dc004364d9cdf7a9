"""Shared memory that batches are made in, allocated once and used in turn.

A fresh block for each batch would cost more than the augmentation: the kernel hands out and clears every page of it
anew. Here worker and training process keep the same pages for the whole run. A finished batch is copied out of its slot
once, into ordinary or pinned memory, which torch recycles, or used where it is if it is not kept for long.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
from weakref import WeakValueDictionary

import torch

PREFETCH = 2
"""Batches that each worker prepares ahead."""
SPARE = 2
"""Slots for each worker besides those."""

_rings: WeakValueDictionary[int, SlotRing] = WeakValueDictionary()
_numbers = itertools.count()


class SlotRing:
    """As many slots as batches can be under way at a time, and some more for each worker.

    Batch `k` is made in slot `k % len(ring)` by worker `k % workers`. A worker starts on batch `k + workers * PREFETCH`
    when batch `k` is handed over, so the slot of a batch is not written again before as many later ones as `stays` were
    handed over.
    """

    def __init__(self, workers: int, shape: tuple[int, int, int, int]):
        self.shape, self.number = shape, next(_numbers)
        self.stays = workers * SPARE
        self._slots = [_shared_block(shape) for _ in range(workers * (PREFETCH + SPARE))]
        _rings[self.number] = self

    def block(self, batch: int) -> torch.Tensor:
        """Memory to make a batch in."""
        return self._slots[batch % len(self._slots)] if self._slots else torch.empty(self.shape, dtype=torch.uint8)

    @property
    def is_shared(self) -> bool:
        """Whether batches are made by workers."""
        return bool(self._slots)


def find_ring(number: int) -> SlotRing:
    """The ring of this number, in the process that made it."""
    return _rings[number]


def _shared_block(shape: tuple[int, int, int, int]) -> torch.Tensor:
    block = torch.Size(shape)
    if multiprocessing.get_start_method() == "fork":
        # Forked workers inherit anonymous memory, which is not limited by the size of /dev/shm as in containers.
        return torch.frombuffer(mmap.mmap(-1, block.numel()), dtype=torch.uint8).view(block)
    return torch.empty(block, dtype=torch.uint8).share_memory_()
