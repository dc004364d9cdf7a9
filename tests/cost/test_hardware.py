"""Peak throughput of a device."""

from __future__ import annotations

import pytest
import torch

from vit_scale.cost import hardware
from vit_scale.cost.hardware import GPUS, find_gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# Names as torch.cuda.get_device_name returns them.
DEVICE_NAMES = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200",
    "NVIDIA H20": "H20",
    "NVIDIA H800": "H800",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA A800-SXM4-80GB": "A800",
    "NVIDIA A800 40GB Active": "A800 40GB",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A40": "A40",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32GB",
    "Tesla V100S-PCIE-32GB": "V100S",
    "Tesla P100-SXM2-16GB": "P100",
    "Tesla P100-PCIE-16GB": "P100 PCIe",
    "Tesla T4": "T4",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI250X": "MI250X",
    "NVIDIA RTX A6000": "A6000",
    "NVIDIA RTX A4000": "A4000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 3080": "RTX 3080",
}
UNKNOWN = [
    "NVIDIA T400 4GB",
    "NVIDIA T4G",
    "Quadro RTX 6000",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3080 Ti",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "GRID A100-10C",
    "NVIDIA A1000",
    "AMD Instinct MI250X / MI250",
]


@pytest.mark.parametrize(("name", "known"), DEVICE_NAMES.items())
def test_device_names_are_found_in_the_table(name: str, known: str) -> None:
    assert find_gpu(name) == known


@pytest.mark.parametrize("name", UNKNOWN)
def test_similar_names_are_not_taken_for_a_known_gpu(name: str) -> None:
    assert find_gpu(name) is None


@pytest.mark.parametrize("name", GPUS)
def test_rates_are_in_order(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.fp32 <= (gpu.tf32 or gpu.fp32) < gpu.tflops
    assert find_gpu(name) == name
    assert (gpu.half == "fp16") <= (gpu.tf32 is None), "bf16 and TF32 came together"


@pytest.mark.parametrize(
    ("precision", "tf32", "tflops", "arithmetic"),
    [("bf16", True, 312, "bf16"), ("fp32", True, 156, "TF32"), ("fp32", False, 19.5, "fp32")],
)
def test_mfu_refers_to_the_peak_of_the_precision(
    precision: str, tf32: bool, tflops: float, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    peak = hardware.peak(CUDA, precision, tf32=tf32)  # type: ignore[arg-type]
    assert peak.flops == tflops * 1e12
    assert peak.describe().endswith(f"GFLOP/s per process (A100 datasheet, dense {arithmetic}; MFU reference)")


def test_cpu_peak_is_measured_and_described() -> None:
    peak = hardware.peak(CPU)
    assert peak.flops > 1e9
    assert "GFLOP/s per process (matmul measured at startup; MFU reference)" in peak.describe()


def test_unknown_peak_means_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "X1")
    assert hardware.peak(CUDA, "bf16").describe() == "unknown for X1 (no MFU)"
