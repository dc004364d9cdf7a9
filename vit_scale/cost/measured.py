"""Measure peak memory, to validate the memory model."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vit_scale import gpu


def peak_bytes(work: Callable[[], object], device: str = "cpu") -> int:
    """Return the peak number of bytes that `work` has allocated through torch's allocator.

    The return value of `work` is kept alive until the measurement ends.
    """
    gc.collect()  # Otherwise reference cycles would be freed, and counted, during `work`.
    return _peak_on_gpu(work) if device == "cuda" else _peak_on_cpu(work)


def _peak_on_gpu(work: Callable[[], object]) -> int:
    device = torch.device("cuda")
    gpu.synchronize(device)
    before = gpu.allocated_memory(device)
    gpu.reset_peak_memory(device)
    held = work()
    gpu.synchronize(device)
    peak = gpu.peak_memory(device) - before
    del held
    return peak


def _peak_on_cpu(work: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        held = work()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = _allocations(profiler.profiler.kineto_results.experimental_event_tree())
    peak = peak_of_allocations(
        (fields.ptr, fields.alloc_size) for _, fields in sorted(events, key=lambda event: event[0])
    )
    del held
    return peak


def peak_of_allocations(events: Iterable[tuple[int, int]]) -> int:
    """Return the peak number of allocated bytes from (address, size) events in order; a negative size means freed.

    The profiler sees only its own thread. A block freed by another thread, such as gloo's after sending a message, is
    considered freed at the latest when part of it is allocated again.
    """
    sizes: dict[int, int] = {}
    starts: list[int] = []  # sorted
    live = peak = 0

    def free(start: int) -> int:
        del starts[bisect.bisect_left(starts, start)]
        return sizes.pop(start)

    for start, size in events:
        if size < 0:
            live -= free(start) if start in sizes else 0
            continue
        first = max(bisect.bisect_right(starts, start) - 1, 0)
        overlapping = starts[first : bisect.bisect_left(starts, start + size)]
        live += size - sum(free(other) for other in overlapping if other + sizes[other] > start)
        bisect.insort(starts, start)
        sizes[start] = size
        peak = max(peak, live)
    return peak


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield (time, block) of all allocations in the event tree."""
    for event in events:
        if hasattr(event.extra_fields, "alloc_size"):
            yield event.start_time_ns, event.extra_fields
        yield from _allocations(event.children)
