"""Device capabilities: precision, peak FLOP/s and threads."""

from __future__ import annotations

import pytest
import torch

from vit_scale.cost import hardware
from vit_scale.errors import UserError

CPU = torch.device("cpu")


def test_auto_precision_on_cpu_is_fp32() -> None:
    assert hardware.resolve_precision("auto", CPU) == "fp32"


def test_bf16_that_would_crash_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_runs_bf16", lambda: False)
    with pytest.raises(UserError, match="illegal instruction"):
        hardware.resolve_precision("bf16", CPU)


def test_bf16_is_tried_in_a_separate_process() -> None:
    """This process survives whether or not the CPU supports bf16."""
    assert hardware._cpu_runs_bf16() in (True, False)


def test_cpu_peak_is_measured_and_described() -> None:
    peak = hardware.peak(CPU)
    assert peak.flops > 1e9
    assert "GFLOP/s per process (matmul measured at startup; MFU reference)" in peak.describe()


def test_unknown_peak_means_no_mfu() -> None:
    assert hardware.Peak(None, "unknown for X1").describe() == "unknown for X1 (no MFU)"


@pytest.mark.parametrize(("flops", "threads"), [(1e8, 1), (1e12, 2)])
def test_small_models_use_one_thread(monkeypatch: pytest.MonkeyPatch, flops: float, threads: int) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        hardware.limit_threads(flops)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_omp_num_threads_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    hardware.limit_threads(1.0)
    assert torch.get_num_threads() == before
