"""Peak memory from the events of torch's allocator."""

from __future__ import annotations

import pytest
import torch

from vit_scale import gpu
from vit_scale.cost.measured import peak_bytes, peak_of_allocations

MB = 2**20


@pytest.mark.parametrize(
    ("events", "peak"),
    [
        ([(0, 10), (10, 20), (0, -10), (30, 5)], 30),
        ([(0, 10), (0, 10), (0, 10)], 10),  # freed by another thread, then allocated again
        ([(100, 50), (0, 10), (90, 20), (40, 10)], 60),  # overlaps the end of a block that must have been freed
        ([(100, 50), (120, 10), (160, 10)], 50),  # lies within that block
        ([(0, 10), (10, 10), (20, 10), (5, 20)], 30),  # replaces three blocks
        ([(0, 10), (10, 10)], 20),  # adjacent
        ([(50, -7), (0, 10)], 10),  # allocated before the measurement
        ([], 0),
    ],
)
def test_overlapping_allocation_implies_the_old_block_was_freed(events: list, peak: int) -> None:
    assert peak_of_allocations(events) == peak


def test_cpu_peak_counts_simultaneously_live_tensors() -> None:
    def work() -> torch.Tensor:
        for _ in range(3):
            first = torch.empty(2 * MB, dtype=torch.uint8)
            del first
        return torch.empty(3 * MB, dtype=torch.uint8)

    assert peak_bytes(work) == 3 * MB


def test_gpu_peak_is_read_when_the_work_is_done_and_excludes_older_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(gpu, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(gpu, "reset_peak_memory", lambda device: log.append("reset"))
    monkeypatch.setattr(gpu, "allocated_memory", lambda device: 100)
    monkeypatch.setattr(gpu, "peak_memory", lambda device: (log.append("read"), 350)[1])
    assert peak_bytes(lambda: log.append("work"), "cuda") == 250
    assert log == ["wait", "reset", "work", "wait", "read"]
