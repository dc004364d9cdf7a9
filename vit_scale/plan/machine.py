"""Devices that a run is planned for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vit_scale.cost.activations import Precision
from vit_scale.cost.hardware import GPUS, peak
from vit_scale.errors import UserError, nearest
from vit_scale.launcher import world_size

DEFAULT_GPU = "H100"
# Fraction of the half-precision peak: 1/2 with TF32; 1/8 for fp32 on GPUs without TF32.
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

    def describe(self) -> str:
        """Format as `64 x H100` or `this CPU`."""
        return f"{self.devices:,} x {self.kind}" if self.device == "cuda" else self.kind

    def precision(self, requested: Precision | Literal["auto"]) -> Precision:
        """Resolve `parallel.precision` for these devices."""
        if requested != "auto":
            return requested
        return self.half if self.device == "cuda" else "fp32"

    def peak_at(self, precision: Precision) -> float | None:
        """Return the peak FLOP/s per device in `precision`."""
        if self.peak_flops is None or self.device == "cpu" or precision != "fp32":
            return self.peak_flops
        return self.peak_flops * (_TF32_RATIO if self.half == "bf16" else _FP32_RATIO)


def find_machine(gpus: int | None = None, gpu: str | None = None) -> Machine:
    """Return `gpus` GPUs of type `gpu`. Without a type: this system's GPU or an H100; without both: this system."""
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus {gpus}: must be at least 1")
    devices = gpus or world_size()
    if gpu is not None:
        return _known(gpu, devices)
    if torch.cuda.is_available():
        return _this_gpu(devices)
    return _known(DEFAULT_GPU, devices, assumed=True) if gpus else _this_cpu(devices)


def _known(name: str, devices: int, *, assumed: bool = False) -> Machine:
    plain = {_plain(known): known for known in GPUS}
    if _plain(name) not in plain:
        near = [plain[match] for match in nearest(_plain(name), plain)]
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"--gpu {name}: unknown GPU; {hint}available: {', '.join(GPUS)}")
    kind = plain[_plain(name)]
    source = f"datasheet; {kind} assumed, set another with --gpu" if assumed else "datasheet"
    found = GPUS[kind]
    return Machine(kind, devices, int(found.memory_gb * 1e9), found.tflops * 1e12, "cuda", found.half, source)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _this_gpu(devices: int) -> Machine:
    properties = torch.cuda.get_device_properties(0)
    half: Precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    found = peak(torch.device("cuda", 0))
    return Machine(properties.name, devices, properties.total_memory, found.flops, "cuda", half, found.source)


def _this_cpu(devices: int) -> Machine:
    """Split the memory and cores of this CPU between the processes."""
    import psutil

    found = peak(torch.device("cpu"))
    flops = None if found.flops is None else found.flops / devices
    kind = "this CPU" if devices == 1 else f"{devices} processes on this CPU"
    return Machine(kind, devices, psutil.virtual_memory().total // devices, flops, "cpu", "fp32", found.source)
