"""How many threads a CPU computes with."""

from __future__ import annotations

import pytest
import torch

from vit_scale.kernels.cpu import limit_threads


@pytest.mark.parametrize(("flops", "threads"), [(1e8, 1), (1e12, 2)])
def test_small_models_use_one_thread(monkeypatch: pytest.MonkeyPatch, flops: float, threads: int) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        limit_threads(flops)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_number_of_threads_set_by_the_user_is_preserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    limit_threads(1.0)
    assert torch.get_num_threads() == before
