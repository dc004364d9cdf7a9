"""What training asks of a GPU besides computing: copies that do not block, waiting for them, and memory statistics.

Everything that needs a stream, pinned memory or an allocator goes through these functions, so tests can replace them by
a stand-in and check the order of copying and waiting without a GPU. docs/gpus.md lists what was checked how.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_gpu(device: torch.device) -> bool:
    """Return whether `device` computes asynchronously, with memory of its own."""
    return device.type == "cuda"


def describe(device: torch.device) -> str:
    """Return the name and memory of a GPU, or `cpu`."""
    if not is_gpu(device):
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 1e9:.1f} GB"


def pin(tensor: Tensor) -> Tensor:
    """Return a copy of a host tensor in pinned memory, which a GPU reads without blocking the host."""
    return tensor.pin_memory()


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on `device`; a GPU receives it without a host synchronization.

    torch reuses the pinned memory only after the copy has completed on the device.
    """
    return pin(tensor).to(device, non_blocking=True) if is_gpu(device) else tensor.to(device)


def host_buffer(like: Tensor) -> Tensor:
    """Return uninitialized host memory for a copy of `like`: pinned if it is on a GPU."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=is_gpu(like.device))


def start_download(tensor: Tensor, buffer: Tensor) -> None:
    """Copy `tensor` to a `host_buffer`; from a GPU the copy is complete only after `wait_for_downloads`."""
    buffer.copy_(tensor, non_blocking=True)


def wait_for_downloads(device: torch.device) -> None:
    """Return when all downloads from `device` that this thread has started are complete."""
    if is_gpu(device):
        torch.cuda.current_stream(device).synchronize()


def synchronize(device: torch.device) -> None:
    """Return when everything started on `device` is complete."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def release_cached_memory(device: torch.device) -> None:
    """Return the memory that torch keeps for reuse to the device."""
    if is_gpu(device):
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from now on."""
    if is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def allocated_memory(device: torch.device) -> int:
    """Return the bytes that this process has allocated on a GPU."""
    return torch.cuda.memory_allocated(device)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process had allocated on a GPU at a time, since `reset_peak_memory`."""
    return torch.cuda.max_memory_allocated(device)
