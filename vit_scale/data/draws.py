"""Random numbers that are a function of (seed, position, slot) and nothing else.

Every random choice about the image at a global position of training reads one slot of that position's row of uniform
numbers. There is no generator to pass around, save or advance, so the choices are the same with any number of workers
and processes, and a resumed run needs no replay. A row is hashed with splitmix64's finalizer (Steele et al., 2014): an
entire batch of rows costs about as much as one `numpy.random.Generator`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = (np.uint64(shift) for shift in (27, 30, 31, 11))

UInt64s = npt.NDArray[np.uint64]


def hash64(x: UInt64s) -> UInt64s:
    """Apply splitmix64's finalizer: a bijection of 64-bit integers whose output bits all depend on all input bits."""
    with np.errstate(over="ignore"):
        x = (x + _GOLDEN).astype(np.uint64)
        x = (x ^ (x >> _S30)) * _MIX_1
        x = (x ^ (x >> _S27)) * _MIX_2
        return x ^ (x >> _S31)


def keys(seed: int, positions: npt.ArrayLike, stream: int = 0) -> UInt64s:
    """Return one 64-bit key per position; `stream` separates unrelated uses of the same positions."""
    head = hash64(np.array([seed], np.uint64) + hash64(np.array([stream], np.uint64)))
    return hash64(head ^ hash64(np.atleast_1d(np.asarray(positions)).astype(np.uint64)))


def uniforms(seed: int, positions: npt.ArrayLike, slots: int, stream: int = 0) -> npt.NDArray[np.float64]:
    """Return uniform numbers in [0, 1), one row of `slots` per position."""
    row = keys(seed, positions, stream)[:, None]
    with np.errstate(over="ignore"):
        bits = hash64(row + np.arange(slots, dtype=np.uint64)[None, :] * _GOLDEN)
    return (bits >> _S11).astype(np.float64) * 2.0**-53


def noise_bytes(key: int, count: int) -> npt.NDArray[np.uint8]:
    """Return `count` uniform bytes, a function of `key`."""
    with np.errstate(over="ignore"):
        words = hash64(np.uint64(key) + np.arange((count + 7) // 8, dtype=np.uint64) * _GOLDEN)
    return words.view(np.uint8)[:count]
