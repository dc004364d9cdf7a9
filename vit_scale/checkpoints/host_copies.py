"""Copies of tensors in host memory, taken while training waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from vit_scale import gpu

Tensors = dict[str, torch.Tensor]


class HostCopies:
    """Copy tensors into buffers that are reused from one call to the next.

    New memory would cost more than the copying: the system clears it page by page, and a GPU copies fast only into
    memory that was pinned before.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensors] = {}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all buffers."""
        for copies in self._buffers.values():
            yield from copies.values()

    @torch.no_grad()
    def take(self, group: str, tensors: Iterable[tuple[str, torch.Tensor | None]]) -> Tensors:
        """Return copies of `tensors`, which the next call with the same `group` overwrites; None is skipped.

        The iterable is exhausted even if memory runs out, because other ranks wait for it; the error is raised then.
        """
        old, copies = self._buffers.get(group, {}), {}
        error: Exception | None = None
        devices = set()
        for name, tensor in tensors:
            if tensor is None or error is not None:
                continue
            try:
                copies[name] = _buffer_for(tensor, old.get(name))
                gpu.start_download(tensor, copies[name])
            except (MemoryError, RuntimeError) as raised:  # torch raises the latter if host memory is short
                error = raised
            devices.add(tensor.device)
        for device in devices:
            gpu.wait_for_downloads(device)
        if error is not None:
            raise MemoryError(str(error)) from error
        self._buffers[group] = copies
        return dict(copies)


def _buffer_for(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    if buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype):
        return buffer
    return gpu.host_buffer(tensor)
