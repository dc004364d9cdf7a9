"""Which precision a device can train in."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Literal

import torch

from vit_scale.cost.activations import Precision
from vit_scale.errors import UserError


def resolve_precision(requested: Precision | Literal["auto"], device: torch.device) -> Precision:
    """Return `fp32`, `bf16` or `fp16`; raise `UserError` if the device does not support the requested one."""
    if requested == "auto":
        if device.type != "cuda":
            return "fp32"
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "cpu" and requested == "fp16":
        raise UserError("parallel.precision = 'fp16': not supported on a CPU; use parallel.precision=auto")
    if device.type == "cpu" and requested == "bf16" and not _cpu_supports_bf16():
        raise UserError(
            "parallel.precision = 'bf16': a bf16 matmul crashes on this CPU (illegal instruction).\n"
            "Use parallel.precision=fp32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment."
        )
    if device.type == "cuda" and requested == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"parallel.precision = 'bf16': not supported by {name}; use fp16 or auto")
    return requested


@functools.cache
def _cpu_supports_bf16() -> bool:
    """Try a matmul in a child process: some CPUs advertise AMX and crash when it is used."""
    code = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print((a @ a).sum().item())"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    return tried.returncode == 0
