"""Peak throughput of a device."""

from __future__ import annotations

import torch

from vit_scale.cost import hardware

CPU = torch.device("cpu")


def test_peak_of_a_cpu_is_measured() -> None:
    peak = hardware.peak(CPU)
    assert peak.flops > 1e9
    assert "measured" in peak.source
