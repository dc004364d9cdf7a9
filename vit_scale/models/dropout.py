"""Dropout (Srivastava et al. 2014)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_scale.kernels import byte_dropout, enabled


class Dropout(nn.Module):
    """Zero each element with probability `rate` in training, and divide the others by 1 - rate.

    On a CPU the random numbers are those of kernels/byte_dropout.py, which are cheaper than torch's.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Return another tensor in training; `x` itself in evaluation."""
        if not self.training or self.rate == 0:
            return x
        if x.device.type != "cpu" or self.rate >= 1 or torch.compiler.is_compiling() or not enabled():
            return F.dropout(x, self.rate)
        return byte_dropout.dropout(x, self.rate)

    def extra_repr(self) -> str:
        """Describe the layer in print(model)."""
        return f"rate={self.rate:g}"
