"""Retain memory that the C library frees for the next tensor, instead of returning it to the system."""

from __future__ import annotations

import ctypes

from vit_scale.kernels import enabled

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = -1
_LARGEST_RETAINED_BLOCK = 32 * 2**20
_DEFAULT_MMAP_MAX = 65536


def retain_freed_memory(*, include_large: bool = False) -> bool:
    """Let this process reuse the blocks that it freed; return False if the C library is not glibc.

    By default glibc returns large blocks to the system immediately and requests them again, and the system clears them
    page by page: for arrays of some hundred kilobytes that takes several times as long as the arithmetic on them.
    Blocks over 32 MB are retained only with `include_large`: for a process that needs them again and again.
    """
    if not enabled():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # glibc accepts no threshold above 32 MB, but can be told to map no block separately.
    settings = {
        _M_TRIM_THRESHOLD: _NEVER,
        _M_MMAP_THRESHOLD: _LARGEST_RETAINED_BLOCK,
        _M_MMAP_MAX: 0 if include_large else _DEFAULT_MMAP_MAX,
    }
    return all(mallopt(name, value) for name, value in settings.items())
