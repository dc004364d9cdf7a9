"""Memory and peak FLOP/s of devices, for MFU and planning."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from vit_scale.cost.activations import Precision
from vit_scale.kernels.onednn import linear


@dataclass(frozen=True)
class Gpu:
    """GPU specifications from the vendor's datasheet: dense peaks in TFLOP/s, accumulated in fp32."""

    tflops: float
    """Half precision, on tensor cores if it has them."""
    memory_gb: float
    """In units of 10^9 bytes; most GPUs have a few percent more, which leaves a margin for fragmentation."""
    fp32: float
    """fp32 without TF32."""
    tf32: float | None = None
    """fp32 matmuls in TF32 (`parallel.tf32`); None: it has none, or torch does not use it."""
    half: Precision = "bf16"
    """Half precision selected by `parallel.precision: auto`."""

    def peak(self, precision: Precision, *, tf32: bool) -> tuple[float, str]:
        """Return the peak in TFLOP/s in `precision`, and the name of the arithmetic."""
        if precision != "fp32":
            return self.tflops, precision
        return (self.tf32, "TF32") if tf32 and self.tf32 is not None else (self.fp32, "fp32")


# Sources: NVIDIA's datasheet of each GPU (where it states a rate "with sparsity", half of it), and for GeForce and RTX
# GPUs the table "Peak FP16 Tensor TFLOPS with FP32 Accumulate" in the whitepapers of Turing (TU102), Ampere (GA102),
# Ada (AD102) and Blackwell (GB202); AMD's product pages. GeForce GPUs reach twice these rates only if they accumulate
# in fp16, which training does not. A MI250X appears as two devices; the numbers are those of one. torch uses TF32 on
# AMD GPUs only if HIPBLASLT_ALLOW_TF32 is set.
GPUS = {
    "H100": Gpu(989, 80, 67, 494),
    "H100 PCIe": Gpu(756, 80, 51, 378),
    "H100 NVL": Gpu(835, 94, 60, 417),
    "H200": Gpu(989, 141, 67, 494),
    "H200 NVL": Gpu(835, 141, 60, 417),
    "H800": Gpu(989, 80, 67, 494),
    "H800 PCIe": Gpu(756, 80, 51, 378),
    "H20": Gpu(148, 96, 44, 74),
    "GH200": Gpu(989, 96, 67, 494),
    "B200": Gpu(2250, 180, 75, 1100),
    "GB200": Gpu(2500, 186, 80, 1250),
    "A100": Gpu(312, 80, 19.5, 156),
    "A100 40GB": Gpu(312, 40, 19.5, 156),
    "A800": Gpu(312, 80, 19.5, 156),
    "A800 40GB": Gpu(312, 40, 19.5, 156),
    "A30": Gpu(165, 24, 10.3, 82),
    "A40": Gpu(149.7, 48, 37.4, 74.8),
    "A10": Gpu(125, 24, 31.2, 62.5),
    "A10G": Gpu(70, 24, 35, 35),
    "L40S": Gpu(362, 48, 91.6, 183),
    "L40": Gpu(181, 48, 90.5, 90.5),
    "L4": Gpu(121, 24, 30.3, 60),
    "V100": Gpu(125, 16, 15.7, half="fp16"),
    "V100 32GB": Gpu(125, 32, 15.7, half="fp16"),
    "V100 PCIe": Gpu(112, 16, 14, half="fp16"),
    "V100 PCIe 32GB": Gpu(112, 32, 14, half="fp16"),
    "V100S": Gpu(130, 32, 16.4, half="fp16"),
    "P100": Gpu(21.2, 16, 10.6, half="fp16"),
    "P100 PCIe": Gpu(18.7, 16, 9.3, half="fp16"),
    "T4": Gpu(65, 16, 8.1, half="fp16"),
    "MI325X": Gpu(1307, 256, 163),
    "MI300X": Gpu(1307, 192, 163),
    "MI250X": Gpu(191.5, 64, 47.9),
    "RTX 6000 Ada": Gpu(364, 48, 91.1, 182),
    "A6000": Gpu(155, 48, 38.7, 77.4),
    "A5000": Gpu(111, 24, 27.8, 55.6),
    "A4000": Gpu(76.7, 16, 19.2, 38.3),
    "RTX 5090": Gpu(209.5, 32, 104.8, 104.8),
    "RTX 4090": Gpu(165, 24, 82.6, 82.6),
    "RTX 4080": Gpu(97.5, 16, 48.7, 48.7),
    "RTX 3090": Gpu(71, 24, 35.6, 35.6),
    "RTX 3080": Gpu(59.5, 10, 29.8, 29.8),
    "RTX 2080 Ti": Gpu(53.8, 11, 13.4, half="fp16"),
}

# Words of a device name that do not change the peaks above: `NVIDIA A100-SXM4-80GB`, `NVIDIA H100 80GB HBM3`.
_BRANDS = {"nvidia", "amd", "instinct", "tesla", "geforce", "rtx", "generation", "active", "oam", "pcie"}
_FORM = re.compile(r"sxm\d?|hbm\d\w?|\d+gb?")


def find_gpu(name: str) -> str | None:
    """Return the entry of `GPUS` for a device name of torch, or None.

    All words of the entry occur in the name and all others have no influence on the peak, so neither a `T400` nor a
    laptop GPU nor a MIG slice is taken for its namesake. The entry with the most words is used.
    """
    words = _words(name)
    found = [known for known in GPUS if (own := _words(known)) <= words and all(map(_is_neutral, words - own))]
    return max(found, key=lambda known: len(_words(known)), default=None)


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s_-]+", name.lower()))


def _is_neutral(word: str) -> bool:
    return word in _BRANDS or _FORM.fullmatch(word) is not None


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


def peak(device: torch.device, precision: Precision = "fp32", *, tf32: bool = True) -> Peak:
    """Return the peak FLOP/s of `device` in the arithmetic of its matmuls.

    On a CPU it is measured with a matmul in fp32, which takes about 0.1 s.
    """
    if device.type == "cpu":
        return Peak(_measured_matmul_flops(), "matmul measured at startup")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    known = find_gpu(name)
    if known is None:
        return Peak(None, f"unknown for {name}")
    tflops, arithmetic = GPUS[known].peak(precision, tf32=tf32)
    return Peak(tflops * 1e12, f"{known} datasheet, dense {arithmetic}")


def _measured_matmul_flops(size: int = 1024, repeats: int = 3) -> float:
    """Measure the faster of the two libraries that models use, MKL and oneDNN."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for matmul in (torch.mm, linear) * repeats:
        start = time.perf_counter()
        matmul(a, b)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
