"""The memory that work really takes, to hold the memory model against."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that torch's allocator had handed out at once, of those that `work` asked for.

    What `work` returns is held until it has been counted.
    """
    gc.collect()  # Cycles of references would else be freed, and counted, in the middle of `work`.
    return _peak_on_gpu(work) if device == "cuda" else _peak_on_cpu(work)


def _peak_on_gpu(work: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del held
    return peak


def _peak_on_cpu(work: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        held = work()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = _allocations(profiler.profiler.kineto_results.experimental_event_tree())
    peak = peak_of((fields.ptr, fields.alloc_size) for _, fields in sorted(events, key=lambda event: event[0]))
    del held
    return peak


def peak_of(events: Iterable[tuple[int, int]]) -> int:
    """The most bytes at once, from blocks in the order in which they were allocated, or freed if the size is negative.

    The profiler sees only its own thread. A block that another one frees, such as gloo's after a message was sent,
    is gone at the latest when a part of it is handed out again.
    """
    sizes: dict[int, int] = {}
    starts: list[int] = []  # In order.
    live = peak = 0

    def forget(start: int) -> int:
        del starts[bisect.bisect_left(starts, start)]
        return sizes.pop(start)

    for start, size in events:
        if size < 0:
            live -= forget(start) if start in sizes else 0
            continue
        first = max(bisect.bisect_right(starts, start) - 1, 0)
        reaching = starts[first : bisect.bisect_left(starts, start + size)]
        live += size - sum(forget(other) for other in reaching if other + sizes[other] > start)
        bisect.insort(starts, start)
        sizes[start] = size
        peak = max(peak, live)
    return peak


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Times and blocks of all allocations among the events and what happened within them."""
    for event in events:
        if hasattr(event.extra_fields, "alloc_size"):
            yield event.start_time_ns, event.extra_fields
        yield from _allocations(event.children)
