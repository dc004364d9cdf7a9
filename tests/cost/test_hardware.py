"""What the device can do, and how it is asked."""

from __future__ import annotations

import pytest
import torch

from vit_scale.cost import hardware
from vit_scale.errors import UserError

CPU = torch.device("cpu")


def test_auto_precision_on_a_cpu_is_fp32() -> None:
    assert hardware.resolve_precision("auto", CPU) == "fp32"


def test_bf16_that_would_kill_the_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_runs_bf16", lambda: False)
    with pytest.raises(UserError, match="illegal instruction"):
        hardware.resolve_precision("bf16", CPU)


def test_bf16_is_tried_in_a_process_of_its_own() -> None:
    """Whatever this CPU does with it, this process survives and has an answer."""
    assert hardware._cpu_runs_bf16() in (True, False)


def test_peak_of_a_cpu_is_measured_and_said() -> None:
    peak = hardware.peak(CPU)
    assert peak.flops > 1e9
    assert "measured" in peak.source


@pytest.mark.parametrize(("flops", "threads"), [(1e8, 1), (1e12, 2)])
def test_small_work_is_done_on_one_thread(monkeypatch: pytest.MonkeyPatch, flops: float, threads: int) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        hardware.limit_threads(flops)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_threads_the_user_chose_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    hardware.limit_threads(1.0)
    assert torch.get_num_threads() == before
