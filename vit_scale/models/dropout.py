"""Dropout (Srivastava et al. 2014), on a CPU with cheaper random numbers and a smaller mask than torch's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LANES = 4
"""Elements that one random number of 64 bits decides on."""
_VALUES = 2**16


class Dropout(nn.Module):
    """Zeroes each element with probability `rate` in training, and divides the others by 1 - rate.

    On a CPU torch draws a number for each element, one after another, and keeps the mask as floats for the backward
    pass: in a small ViT a quarter of a step. Here one number does for four elements, and the mask is of bytes. The
    probability is then a multiple of 1/65,536, which the division takes into account. The input is changed in place:
    only for one that nobody needs again, neither the caller nor the backward pass of what it comes from.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself, changed."""
        if not self.training or self.rate == 0:
            return x
        if x.device.type != "cpu" or self.rate >= 1 or torch.compiler.is_compiling():
            return F.dropout(x, self.rate)
        return _CpuDropout.apply(x, round(self.rate * _VALUES))

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"rate={self.rate:g}"


class _CpuDropout(torch.autograd.Function):
    """With `dropped` of the 65,536 values that 16 random bits can have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: int) -> Tensor:
        keep = draw_kept_elements(x, dropped)
        ctx.save_for_backward(keep)
        ctx.scale = _VALUES / (_VALUES - dropped)
        ctx.mark_dirty(x)
        return x.mul_(_factors(keep, ctx.scale, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # The gradient itself stays what it is: that of a residual sum goes to both of its terms as one tensor.
        (keep,) = ctx.saved_tensors
        return _factors(keep, ctx.scale, grad.dtype).mul_(grad), None


def _factors(keep: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """0 or `scale`. Numbers of one type multiply several times as fast as bytes with floats."""
    return keep.to(dtype).mul_(scale)


def draw_kept_elements(x: Tensor, dropped: int) -> Tensor:
    """Bytes of 0 and 1 in the shape of `x`."""
    numbers = torch.empty(-(-x.numel() // _LANES), dtype=torch.int64).random_(-(2**63), None)
    lanes = numbers.view(torch.int16)[: x.numel()].view(x.shape)
    return (lanes >= dropped - _VALUES // 2).view(torch.uint8)
