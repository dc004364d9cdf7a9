"""Dropout of elements (Srivastava et al. 2014) and of patches.

Shapes: B batch, N tokens, K kept patches, D token width.
"""

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


def drop_patches(x_BND: Tensor, rate: float, prefix: int) -> tuple[Tensor, Tensor]:
    """Keep all prefix tokens and per image a random fraction 1 - rate of its patches, at least one.

    Returns the tokens that are kept and their indices, [B, N].
    """
    batch, patches = x_BND.shape[0], x_BND.shape[1] - prefix
    kept = max(1, int(patches * (1 - rate)))
    return keep_patches(x_BND, torch.rand(batch, patches, device=x_BND.device).argsort(dim=1)[:, :kept], prefix)


def keep_patches(x_BND: Tensor, keep_BK: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Keep all prefix tokens and per image the patches of these indices.

    Returns the tokens that are kept and their indices, [B, N].
    """
    first = torch.arange(prefix, device=x_BND.device).expand(x_BND.shape[0], -1)
    keep_BN = torch.cat([first, keep_BK + prefix], dim=1)
    return x_BND.gather(1, keep_BN.unsqueeze(-1).expand(-1, -1, x_BND.shape[2])), keep_BN
