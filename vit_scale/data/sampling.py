"""Which image stands where: pure functions of (seed, position), so that no order is ever replayed or restored.

Positions are global and run over epochs without a gap: position `p` belongs to epoch `p // n` of `n` images and to step
`p // global_batch`. A step's global batch is cut into a contiguous slice for each process, and that into micro batches.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Copies of an image under repeated augmentation are spread over blocks of this many images, so that neighbours (which
# are mixed with each other) are different images, yet nearly all copies fall into one global batch.
_REPEAT_BLOCK = 16


def sample_index(seed: int, positions: npt.ArrayLike, n: int, repeats: int = 1) -> Ints:
    """Index of the image at each global position. Without repeats every epoch of `n` positions has each image once.

    With repeats (DeiT's repeated augmentation) an epoch of `n` positions has `n / repeats` images, each so many times.
    """
    positions = np.asarray(positions, dtype=np.int64)
    epochs, places = np.divmod(np.atleast_1d(positions), n)
    if repeats > 1:
        places = _repeated_place(places, repeats) % n
    index = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        index[here] = _epoch_order(seed, int(epoch), n)[places[here]]
    return index.reshape(positions.shape)


# Two, because a batch may straddle two epochs.
@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, n: int) -> Ints:
    return np.random.default_rng([seed, epoch]).permutation(n)


def _repeated_place(places: Ints, repeats: int) -> Ints:
    block, within = np.divmod(places, _REPEAT_BLOCK * repeats)
    copy, place = np.divmod(within, _REPEAT_BLOCK)
    # An odd factor permutes the block, another one for each copy: each copy of an image gets other neighbours.
    return block * _REPEAT_BLOCK + place * (2 * copy + 1) % _REPEAT_BLOCK


def step_positions(step: int, global_batch: int, rank: int, world: int, micro: int) -> list[Ints]:
    """Positions of this process's micro batches in `step`: a contiguous slice of the global batch, cut in order."""
    share = global_batch // world
    if share * world != global_batch or share % micro != 0:
        raise ValueError(f"{world} processes x micro batches of {micro} do not divide a global batch of {global_batch}")
    start = step * global_batch + rank * share
    return [np.arange(start + i, start + i + micro, dtype=np.int64) for i in range(0, share, micro)]


def eval_places(n: int, batch: int, rank: int, world: int) -> list[Ints]:
    """Indices of this process's evaluation batches; -1 pads, so that all processes have equally many full batches."""
    rounds = -(-n // (batch * world))
    padded = np.full(rounds * world * batch, -1, dtype=np.int64)
    padded[:n] = np.arange(n)
    return list(padded.reshape(rounds, world, batch)[:, rank])
