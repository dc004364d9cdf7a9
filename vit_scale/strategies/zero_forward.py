"""The forward pass under ZeRO: autocast in half precision, and linear layers that do not keep gathered weights.

Half precision is the same as under DDP: fp32 weights, autocast, fp32 gradients. DeepSpeed's own (`bf16`, `fp16`) casts
the weights and with them the residual stream, where a small LayerScale is lost to rounding: with gamma 1e-4 the blocks
of a ViT-L change 3 to 6% of its elements. Its `torch_autocast` also reduces gradients in half precision, and in fp16
never lowers the loss scale. So its engine is in fp32, and this module adds what is missing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vit_scale.kernels.watch import accept_type

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def use_autocast(model: nn.Module, dtype: torch.dtype, device: torch.device, *, cache_weights: bool) -> None:
    """Let `model` compute in `dtype` where autocast does and return fp32, as accelerate does under DDP.

    `cache_weights`: keep the casts of weights until the forward pass ends, for layers that are used repeatedly.
    """
    from accelerate.utils import convert_outputs_to_fp32

    autocast = torch.autocast(device.type, dtype, cache_enabled=cache_weights)
    model.forward = convert_outputs_to_fp32(autocast(model.forward))


def send_in_half_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Let ZeRO-3 gather the trained weights that autocast casts to `dtype` in `dtype`; call it on a wrapped model.

    Shards, gathered weights and the reduction of gradients stay in fp32.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and module.weight.requires_grad:
            module.weight.comm_dtype = dtype  # type: ignore[attr-defined]  # read by DeepSpeed's all-gather


def free_gathered_weights(model: nn.Module) -> None:
    """Let linear layers save their sharded weight for the backward pass, for which ZeRO-3 gathers it again.

    Autograd would save the cast of each weight: the full model on each rank. DeepSpeed's own linear layer, which fp32
    uses, would also save inputs in fp32, and round an output twice, before and after the bias is added.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ShardedLinear
    accept_type(model, nn.Linear, ShardedLinear)


class ShardedLinear(nn.Linear):
    """A linear layer under autocast whose weight is sharded except while it is used."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute in the dtype of autocast, if it is enabled."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return _Linear.apply(x, self.weight, self.bias, dtype)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """A linear layer in `dtype` that saves the parameter itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x = x.to(dtype)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        with torch.autocast(grad.device.type, enabled=False):
            return (  # autograd casts them to the dtypes of the inputs
                grad @ weight.to(grad.dtype) if needs_x else None,
                rows.T @ x.flatten(0, -2) if needs_weight else None,
                rows.sum(0) if needs_bias else None,
                None,
            )
