"""Attention kernels: which run here, and whether they equal the explicit computation."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from vit_scale.doctor.check import Check, Setup, broken, largest, skipped, slow, works
from vit_scale.errors import UserError
from vit_scale.kernels import cpu, cpu_attention, enabled
from vit_scale.models.attention import Attention, Kernel, check_attention_kernel

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest error relative to the largest value, against the explicit computation in float64."""
TOKENS, WIDTH, HEADS = 197, 384, 6
"""ViT-S/16."""


def kernel(setup: Setup, name: Kernel) -> Check:
    """Compare output and gradients of a kernel in every precision with the explicit computation."""
    shown, errors, refused = f"attention {name}", {}, ""
    for dtype in _dtypes(setup.device):
        label = str(dtype).removeprefix("torch.")
        setup.stage(f"computing in {label}")
        try:
            check_attention_kernel(name, setup.device, dtype=dtype)
        except UserError as error:
            refused = str(error).split(". ")[0]
            continue
        errors[label] = error_of(name, setup.device, dtype)
        if errors[label] > TOLERANCES[dtype]:
            advice = f"do not train with this kernel: set model.kernel={'explicit' if name == 'math' else 'math'}"
            return broken(shown, f"wrong by {errors[label]:.0e} in {label}", advice, error=errors)
    if not errors:
        if name == "flash" and setup.gpus:
            return slow(shown, refused, "attention takes longer and more memory: update torch, or use another GPU")
        return skipped(shown, f"does not run on this {'GPU' if setup.gpus else 'CPU'}")
    listed = ", ".join(f"{label} {error:.0e}" for label, error in errors.items())
    return works(shown, f"equals the explicit computation, relative error {listed}", error=errors)


def custom_kernel(setup: Setup) -> Check:
    """Check the attention kernel for CPUs that setup.py compiles."""
    name = "attention cpu kernel"
    if setup.gpus:
        return skipped(name, "attention runs on the GPU")
    if not enabled():
        return slow(name, "switched off by VIT_SCALE_KERNELS=0", "unset VIT_SCALE_KERNELS")
    if cpu.vectors() not in ("AVX2", "AVX512"):
        return skipped(name, f"written for AVX2 and AVX-512; this CPU has {cpu.vectors()}")
    if not cpu_attention.is_built():
        return slow(name, "not built", "install gcc, then run: pip install --force-reinstall --no-deps -e .")
    found = error_of("custom", "cpu", torch.float32)
    if found > TOLERANCES[torch.float32]:
        return broken(name, f"wrong by {found:.0e}", "set VIT_SCALE_KERNELS=0, and report this CPU", error=found)
    return works(name, f"built for {cpu.vectors()}, relative error {found:.0e}", error=found)


def error_of(name: str, device: str, dtype: torch.dtype) -> float:
    """Return the largest error of output and gradient, relative to the largest value.

    `name`: a kernel of `model.kernel`, or `custom` for the one in vit_scale/kernels.
    """
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, TOKENS, 3 * WIDTH, generator=generator).to(device, dtype)
    grad = torch.randn(2, TOKENS, WIDTH, generator=generator).to(device, dtype)
    exact = _attend("explicit", qkv.double(), grad.double())
    pairs = zip(_attend(name, qkv, grad), exact, strict=True)
    return largest(((found.double() - right).abs().max() / right.abs().max()).item() for found, right in pairs)


def _attend(name: str, qkv: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the packed queries, keys and values."""
    qkv = qkv.detach().requires_grad_()
    if name == "custom":
        y = cpu_attention.attend(qkv, HEADS)
    else:
        layer = Attention(WIDTH, HEADS, kernel=cast(Any, name))
        y = layer.attend(*layer.split(qkv))
    return y.detach(), torch.autograd.grad(y, qkv, grad)[0]


def _dtypes(device: str) -> list[torch.dtype]:
    return [torch.float32] if device == "cpu" else [torch.bfloat16, torch.float16, torch.float32]
