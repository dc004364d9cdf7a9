"""Which image is at which position: pure functions of (seed, position), so no order is ever replayed or restored.

Positions are global and run over epochs without a gap: position `p` belongs to epoch `p // n` of `n` images and to step
`p // global_batch`. The global batch of a step is split into one contiguous slice per process, and each slice into
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vit_scale.data.class_balance import ClassBalance

Ints = npt.NDArray[np.int64]

# Copies of an image under repeated augmentation are spread over blocks of this many images, so that neighbors (which
# are mixed with each other) are different images, yet nearly all copies are in one global batch.
_REPEAT_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class TrainIndices:
    """Positions and image indices of each micro-batch of one process, in order."""

    global_batch: int
    micro_batch: int
    rank: int = 0
    world: int = 1
    start_step: int = 0
    end_step: int
    seed: int
    images: int
    """Images of the source; not used for streams."""
    repeats: int = 1
    balance: ClassBalance | None = None
    """Draw classes evenly (`data.balance`)."""

    def __len__(self) -> int:
        return (self.end_step - self.start_step) * (self.global_batch // self.world // self.micro_batch)

    def __iter__(self) -> Iterator[tuple[Ints, Ints]]:
        for positions in self.positions():
            yield positions, sample_index(self.seed, positions, self.images, self.repeats, self.balance)

    def positions(self) -> Iterator[Ints]:
        """Yield the global positions of each micro-batch."""
        for step in range(self.start_step, self.end_step):
            yield from step_positions(step, self.global_batch, self.rank, self.world, self.micro_batch)


@dataclass(frozen=True, kw_only=True)
class EvalIndices:
    """Image indices of each evaluation batch of one process; -1 pads, so that all processes have full batches."""

    images: int
    """Images of the source; not used for streams."""
    batch: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        return -(-self.images // (self.batch * self.world))

    def __iter__(self) -> Iterator[Ints]:
        padded = np.full(len(self) * self.world * self.batch, -1, dtype=np.int64)
        padded[: self.images] = np.arange(self.images)
        return iter(padded.reshape(len(self), self.world, self.batch)[:, self.rank])


def sample_index(
    seed: int, positions: npt.ArrayLike, n: int, repeats: int = 1, balance: ClassBalance | None = None
) -> Ints:
    """Return the image index at each global position. Without repeats every epoch of `n` positions has each image once.

    With repeats (DeiT's repeated augmentation) an epoch of `n` positions has `n / repeats` images, each repeated. With
    `balance` an epoch of as many images has each class equally often.
    """
    positions = np.asarray(positions, dtype=np.int64)
    epochs, places = np.divmod(np.atleast_1d(positions), n)
    if repeats > 1:
        places = _repeated_place(places, repeats) % n
    index = np.empty_like(places)
    drawn = min(n, -(-n // (_REPEAT_BLOCK * repeats)) * _REPEAT_BLOCK) if repeats > 1 else n
    for epoch in np.unique(epochs):
        here = epochs == epoch
        order = _epoch_order(seed, int(epoch), drawn if balance else n, balance)
        index[here] = order[places[here]]
    return index.reshape(positions.shape)


# Two, because a batch may straddle two epochs.
@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, size: int, balance: ClassBalance | None) -> Ints:
    """Return the image indices of an epoch of `size` draws, in order."""
    order = np.random.default_rng([seed, epoch]).permutation(size)
    return balance.draw(seed, np.arange(epoch * size, (epoch + 1) * size))[order] if balance else order


def _repeated_place(places: Ints, repeats: int) -> Ints:
    block, within = np.divmod(places, _REPEAT_BLOCK * repeats)
    copy, place = np.divmod(within, _REPEAT_BLOCK)
    # An odd factor permutes the block, a different one per copy: each copy of an image gets different neighbors.
    return block * _REPEAT_BLOCK + place * (2 * copy + 1) % _REPEAT_BLOCK


def step_positions(step: int, global_batch: int, rank: int, world: int, micro: int) -> list[Ints]:
    """Return the positions of a process's micro-batches in `step`: a contiguous slice of the global batch, in order."""
    per_process = global_batch // world
    if per_process * world != global_batch or per_process % micro != 0:
        raise ValueError(f"{world} processes x micro-batches of {micro} do not divide a global batch of {global_batch}")
    start = step * global_batch + rank * per_process
    return [np.arange(start + i, start + i + micro, dtype=np.int64) for i in range(0, per_process, micro)]
