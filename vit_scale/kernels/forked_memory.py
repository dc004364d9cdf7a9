"""Data-loading workers give up the memory that only training needs.

A forked worker shares the memory of the training process until one of them writes to it; then the system copies the
page. Training rewrites weights, gradients and optimizer state in every step, so without this each worker would keep a
copy of all of them as they were when it started.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

_MADV_DONTNEED = 4  # from Linux's mman.h: the calling process reads zeros from now on
_MIN_BYTES = 2**20


class TensorOwner(Protocol):
    """Holds tensors that no data-loading worker reads."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors; called in the worker, so it must not communicate."""


_owners: list[weakref.ref[TensorOwner]] = []


def release_in_workers(owner: TensorOwner) -> None:
    """Let workers that are forked from now on give up the tensors of `owner`, for as long as it lives."""
    _owners.append(weakref.ref(owner, _owners.remove))


def release_inherited_memory() -> None:
    """Give up inherited memory; called first in a forked worker. Only Linux with glibc does it."""
    try:
        libc = ctypes.CDLL(None)
        madvise, malloc_trim = libc.madvise, libc.malloc_trim
    except (AttributeError, OSError):
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for address, size in _whole_pages():
        madvise(address, size, _MADV_DONTNEED)
    malloc_trim(ctypes.c_size_t(0))  # what training freed and will reuse, such as activations


def _whole_pages() -> set[tuple[int, int]]:
    """Return address and size of the memory pages that lie within one tensor and can be given up."""
    pages = set()
    for owner in [reference() for reference in _owners]:
        for tensor in owner.tensors() if owner is not None else ():
            if tensor.device.type != "cpu" or tensor.is_shared():
                continue
            storage = tensor.untyped_storage()
            start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if last - first >= _MIN_BYTES:
                pages.add((first, last - first))
    return pages
