"""Copies of tensors in host memory, taken while training waits."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]


class HostCopies:
    """Takes copies into memory that is kept from one time to the next.

    Fresh memory would cost more than the copying: the system clears it page by page, and a GPU copies quickly only
    into memory that was pinned before.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensors] = {}

    @torch.no_grad()
    def take(self, group: str, tensors: Tensors) -> Tensors:
        """Copies of `tensors`, which are overwritten by the next call with the same `group`."""
        old = self._buffers.get(group, {})
        copies = {name: _buffer_for(tensor, old.get(name)) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        self._buffers[group] = copies
        return dict(copies)


def _buffer_for(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    if buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype):
        return buffer
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
