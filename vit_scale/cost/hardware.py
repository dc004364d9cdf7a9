"""Memory and peak FLOP/s of devices, for MFU and planning."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from vit_scale.cost.activations import Precision
from vit_scale.kernels.onednn import linear


@dataclass(frozen=True)
class Gpu:
    """GPU specifications from the vendor's datasheet."""

    tflops: float
    """Peak dense tensor-core throughput in half precision, in TFLOP/s."""
    memory_gb: float
    """In units of 10^9 bytes; most GPUs have a few percent more, which leaves a margin for fragmentation."""
    half: Precision = "bf16"
    """Half precision selected by `parallel.precision: auto`."""


# The first name contained in torch's device name is used, so longer names come first.
GPUS = {
    "H100 PCIe": Gpu(756, 80),
    "H100": Gpu(989, 80),
    "H200": Gpu(989, 141),
    "B200": Gpu(2250, 180),
    "MI300X": Gpu(1300, 192),
    "A100 40GB": Gpu(312, 40),
    "A100": Gpu(312, 80),
    "L40S": Gpu(362, 48),
    "A6000": Gpu(155, 48),
    "V100 32GB": Gpu(125, 32, "fp16"),
    "V100": Gpu(125, 16, "fp16"),
    "T4": Gpu(65, 16, "fp16"),
    "RTX 4090": Gpu(165, 24),
    "RTX 3090": Gpu(71, 24),
}


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of a device and its source."""

    flops: float | None
    source: str

    def describe(self) -> str:
        """Describe the peak that MFU is relative to."""
        if self.flops is None:
            return f"{self.source} (no MFU)"
        return f"{self.flops / 1e9:,.0f} GFLOP/s per process ({self.source}; MFU reference)"

    def numbers(self) -> dict[str, float | str | None]:
        return {"peak_flops": self.flops, "peak_source": self.source}


def peak(device: torch.device) -> Peak:
    """Return the peak FLOP/s of `device`; on CPU it is measured with a matmul, which takes about 0.1 s."""
    if device.type == "cpu":
        return Peak(_measured_matmul_flops(), "matmul measured at startup")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    for known, gpu in GPUS.items():
        if known in name:
            return Peak(gpu.tflops * 1e12, f"{known} datasheet")
    return Peak(None, f"unknown for {name}")


def _measured_matmul_flops(size: int = 1024, repeats: int = 3) -> float:
    """Measure the faster of the two libraries that models use, MKL and oneDNN."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for matmul in (torch.mm, linear) * repeats:
        start = time.perf_counter()
        matmul(a, b)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
