"""Shared memory for batches, allocated once and used in turn.

A new block per batch would cost more than the augmentation: the kernel would allocate and clear every page again. Here
worker and training process keep the same pages for the entire run. A finished batch is copied out of its slot once,
into ordinary or pinned memory, which torch recycles, or used in place if it is not needed for long.
"""

from __future__ import annotations

import itertools
import math
import mmap
import multiprocessing
from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

PREFETCH = 2
"""Batches that each worker prepares ahead."""
SPARE = 2
"""Additional slots per worker."""

_rings: WeakValueDictionary[int, SlotRing] = WeakValueDictionary()
_numbers = itertools.count()

Blocks = dict[str, torch.Tensor]
"""The arrays of one batch by name, such as `images` and `mask`."""


class BlockSpec(NamedTuple):
    """Shape and type of one array of a batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.uint8


class SlotRing:
    """As many slots as batches can be in progress at a time, plus spare ones per worker.

    Worker `k % workers` builds batch `k` in slot `k % len(ring)`. It starts on batch `k + workers * PREFETCH` when
    batch `k` is returned, so a slot is not overwritten until `reserved` later batches have been returned.
    """

    def __init__(self, workers: int, specs: Mapping[str, BlockSpec]):
        self.specs, self.number = dict(specs), next(_numbers)
        self.reserved = workers * SPARE
        self._slots = [
            {name: _shared_block(spec) for name, spec in specs.items()} for _ in range(workers * (PREFETCH + SPARE))
        ]
        _rings[self.number] = self

    def blocks(self, batch: int) -> Blocks:
        """Return the memory to build a batch in."""
        if self._slots:
            return self._slots[batch % len(self._slots)]
        return {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in self.specs.items()}

    @property
    def is_shared(self) -> bool:
        """Whether batches are built by workers."""
        return bool(self._slots)


def find_ring(number: int) -> SlotRing:
    """Return the ring of this number, in the process that created it."""
    return _rings[number]


def _shared_block(spec: BlockSpec) -> torch.Tensor:
    if multiprocessing.get_start_method() == "fork":
        # Forked workers inherit anonymous memory, which is not limited by the size of /dev/shm as in containers.
        memory = mmap.mmap(-1, math.prod(spec.shape) * spec.dtype.itemsize)
        return torch.frombuffer(memory, dtype=spec.dtype).view(spec.shape)
    return torch.empty(spec.shape, dtype=spec.dtype).share_memory_()
