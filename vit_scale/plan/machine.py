"""Devices that a run is planned for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vit_scale.cost.activations import Precision
from vit_scale.cost.hardware import GPUS, Gpu, find_gpu, peak
from vit_scale.errors import UserError, nearest
from vit_scale.launcher import world_size

DEFAULT_GPU = "H100"
# Fraction of the half-precision peak on GPUs that are not in the table: 1/2 with TF32; 1/8 for fp32 without it.
_TF32_RATIO, _FP32_RATIO = 1 / 2, 1 / 8


@dataclass(frozen=True)
class Machine:
    """Identical devices, one per process."""

    kind: str
    devices: int
    memory: int
    """Bytes per device."""
    peak_flops: float | None
    """FLOP/s per device in half precision (CPU: fp32); None: unknown."""
    device: Literal["cuda", "cpu"]
    half: Precision = "bf16"
    source: str = "datasheet"
    """Source of the numbers."""
    tf32_flops: float | None = None
    fp32_flops: float | None = None
    """FLOP/s per device in fp32, with TF32 matmuls and without; None: estimated from half precision."""

    def describe(self) -> str:
        """Format as `64 x H100` or `this CPU`."""
        return f"{self.devices:,} x {self.kind}" if self.device == "cuda" else self.kind

    def precision(self, requested: Precision | Literal["auto"]) -> Precision:
        """Resolve `parallel.precision` for these devices."""
        if requested != "auto":
            return requested
        return self.half if self.device == "cuda" else "fp32"

    def peak_at(self, precision: Precision, *, tf32: bool = True) -> float | None:
        """Return the peak FLOP/s per device in `precision`; `tf32`: fp32 matmuls may use TF32."""
        if self.peak_flops is None or self.device == "cpu" or precision != "fp32":
            return self.peak_flops
        if tf32 and self.half == "bf16":
            return self.tf32_flops or self.fp32_flops or self.peak_flops * _TF32_RATIO
        return self.fp32_flops or self.peak_flops * _FP32_RATIO


def find_machine(
    gpus: int | None = None,
    gpu: str | None = None,
    *,
    memory_gb: float | None = None,
    tflops: float | None = None,
) -> Machine:
    """Return `gpus` GPUs of type `gpu`. Without a type: this system's GPU or an H100; without both: this system.

    `memory_gb` (10^9 bytes) and `tflops` (dense, in bf16) describe a GPU that is not in the table, called `gpu`.
    """
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus {gpus}: must be at least 1")
    devices = gpus or world_size()
    if memory_gb is not None or tflops is not None:
        return _described(gpu or "GPU", devices, memory_gb, tflops)
    if gpu is not None:
        return _known(gpu, devices)
    if torch.cuda.is_available():
        return _this_gpu(devices)
    return _known(DEFAULT_GPU, devices, assumed=True) if gpus else _this_cpu(devices)


def _described(name: str, devices: int, memory_gb: float | None, tflops: float | None) -> Machine:
    """Return GPUs described on the command line."""
    flags = {"--gpu-memory": memory_gb, "--gpu-tflops": tflops}
    for flag, value in flags.items():
        if value is None:
            raise UserError(
                f"{flag} is missing: a GPU that is not in the table needs --gpu-memory GB --gpu-tflops TFLOPS"
            )
        if not 0 < value < float("inf"):
            raise UserError(f"{flag} {value:g}: must be greater than 0")
    assert memory_gb is not None
    assert tflops is not None
    return Machine(name, devices, int(memory_gb * 1e9), tflops * 1e12, "cuda", "bf16", "--gpu-tflops")


def _known(name: str, devices: int, *, assumed: bool = False) -> Machine:
    plain = {_plain(known): known for known in GPUS}
    kind = plain.get(_plain(name)) or find_gpu(name)
    if kind is None:
        near = [plain[match] for match in nearest(_plain(name), plain)]
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"--gpu {name}: unknown GPU; {hint}available: {', '.join(GPUS)}.\n"
            "For another GPU, add --gpu-memory GB --gpu-tflops TFLOPS."
        )
    source = f"datasheet; {kind} assumed, set another with --gpu" if assumed else "datasheet"
    found = GPUS[kind]
    memory, half = int(found.memory_gb * 1e9), found.tflops * 1e12
    return Machine(kind, devices, memory, half, "cuda", found.half, source, **_fp32_peaks(found))


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _fp32_peaks(gpu: Gpu) -> dict[str, float | None]:
    return {"tf32_flops": gpu.tf32 and gpu.tf32 * 1e12, "fp32_flops": gpu.fp32 * 1e12}


def _this_gpu(devices: int) -> Machine:
    properties = torch.cuda.get_device_properties(0)
    half: Precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    found = peak(torch.device("cuda", 0), half)
    kind = find_gpu(properties.name)
    fp32 = {} if kind is None else _fp32_peaks(GPUS[kind])
    return Machine(properties.name, devices, properties.total_memory, found.flops, "cuda", half, found.source, **fp32)


def _this_cpu(devices: int) -> Machine:
    """Split the memory and cores of this CPU between the processes."""
    import psutil

    found = peak(torch.device("cpu"))
    flops = None if found.flops is None else found.flops / devices
    kind = "this CPU" if devices == 1 else f"{devices} processes on this CPU"
    return Machine(kind, devices, psutil.virtual_memory().total // devices, flops, "cpu", "fp32", found.source)
