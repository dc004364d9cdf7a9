"""Memory of the C library, kept for the next tensor instead of given back to the system."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = -1
_LARGEST_KEPT_BLOCK = 32 * 2**20
_MAPPED_BLOCKS = 65536  # As many as by default.


def keep_freed_memory(*, of_any_size: bool = False) -> bool:
    """Let this process reuse the blocks that it freed; False where the C library is not glibc.

    By itself glibc gives large blocks back at once and asks for them anew, and the system clears them page by page:
    for arrays of some hundred kilobytes that takes several times as long as the arithmetic on them. Blocks of more than
    32 MB are kept only where `of_any_size` says so: for a process that needs them again and again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # glibc takes no larger threshold for blocks than 32 MB, but can be told to map none at all on their own.
    settings = {
        _M_TRIM_THRESHOLD: _NEVER,
        _M_MMAP_THRESHOLD: _LARGEST_KEPT_BLOCK,
        _M_MMAP_MAX: 0 if of_any_size else _MAPPED_BLOCKS,
    }
    return all(mallopt(name, value) for name, value in settings.items())
