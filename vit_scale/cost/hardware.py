"""What the device can do: its memory and its peak, for MFU and for planning."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from vit_scale.cost.activations import Precision
from vit_scale.kernels.onednn import linear


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, from the vendor's data sheet."""

    tflops: float
    """Dense peak of the tensor cores in TFLOP/s, in half precision."""
    memory_gb: float
    """In units of 10^9 bytes; most have a few percent more, which is what fragmentation may take."""
    half: Precision = "bf16"
    """The half precision that `parallel.precision: auto` takes there."""


# The first name contained in torch's device name counts, so the longer names stand first.
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
    """The most a device can do, and where the figure comes from."""

    flops: float | None
    source: str

    def describe(self) -> str:
        """Return the reference of MFU."""
        if self.flops is None:
            return f"{self.source}; no MFU"
        return f"{self.flops / 1e9:,.0f} GFLOP/s per process ({self.source}; MFU reference)"

    def numbers(self) -> dict[str, float | str | None]:
        return {"peak_flops": self.flops, "peak_source": self.source}


def peak(device: torch.device) -> Peak:
    """Peak of `device` in FLOP/s; on a CPU a matrix product is timed, which takes about 0.1 s."""
    if device.type == "cpu":
        return Peak(_measured_matmul_flops(), "matmul measured at startup")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    for known, gpu in GPUS.items():
        if known in name:
            return Peak(gpu.tflops * 1e12, f"data sheet of {known}")
    return Peak(None, f"unknown for {name}")


def _measured_matmul_flops(size: int = 1024, repeats: int = 3) -> float:
    """Of the faster of the two libraries that models compute with, MKL and oneDNN."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for product in (torch.mm, linear) * repeats:
        start = time.perf_counter()
        product(a, b)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
