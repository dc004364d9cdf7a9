"""Dropout on a CPU with cheaper random numbers and a smaller mask than torch's.

torch draws one number per element, one after another, and saves the mask as floats for the backward pass: 25% of a
training step of a small ViT. Here one random number decides on four elements, and the mask consists of bytes.
"""

from typing import Any

import torch
from torch import Tensor

_LANES = 4
"""Elements that one random number of 64 bits decides on."""
_VALUES = 2**16


def dropout(x: Tensor, rate: float) -> Tensor:
    """Zero each element of a CPU tensor with probability `rate` and scale the others; x is not changed.

    The probability is rounded to a multiple of 1/65,536, which the scale takes into account.
    """
    return _ByteDropout.apply(x, round(rate * _VALUES))


def draw_kept_elements(x: Tensor, dropped: int) -> Tensor:
    """Draw bytes of 0 and 1 in the shape of `x`: 0 for `dropped` of the 65,536 values of 16 random bits."""
    numbers = torch.empty(-(-x.numel() // _LANES), dtype=torch.int64).random_(-(2**63), None)
    lanes = numbers.view(torch.int16)[: x.numel()].view(x.shape)
    return (lanes >= dropped - _VALUES // 2).view(torch.uint8)


class _ByteDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: int) -> Tensor:
        keep = draw_kept_elements(x, dropped)
        ctx.save_for_backward(keep)
        ctx.scale = _VALUES / (_VALUES - dropped)
        # Written over the factors: no more memory than overwriting x, which whoever made it may still need.
        return _factors(keep, ctx.scale, x.dtype).mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # The incoming gradient is not changed: both terms of a residual sum receive the same tensor.
        (keep,) = ctx.saved_tensors
        return _factors(keep, ctx.scale, grad.dtype).mul_(grad), None


def _factors(keep: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return 0 or `scale` per element; multiplying tensors of one dtype is several times as fast as mixing dtypes."""
    return keep.to(dtype).mul_(scale)
