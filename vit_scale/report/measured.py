"""The memory that work really takes, to hold the memory model against."""

from __future__ import annotations

import gc
from collections.abc import Callable

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
    live = peak = 0
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del held
    return peak
