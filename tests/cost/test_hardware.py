"""Peak throughput of a device."""

from __future__ import annotations

import torch

from vit_scale.cost import hardware

CPU = torch.device("cpu")


def test_cpu_peak_is_measured_and_described() -> None:
    peak = hardware.peak(CPU)
    assert peak.flops > 1e9
    assert "GFLOP/s per process (matmul measured at startup; MFU reference)" in peak.describe()


def test_unknown_peak_means_no_mfu() -> None:
    assert hardware.Peak(None, "unknown for X1").describe() == "unknown for X1 (no MFU)"
