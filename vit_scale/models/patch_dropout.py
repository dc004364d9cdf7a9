"""Patch dropout: train on a random part of the patches (Liu et al. 2022, arXiv:2208.07220).

Shapes: B batch, N tokens, D token width.
"""

import torch
from torch import Tensor


def drop_patches(x_BND: Tensor, rate: float, prefix: int) -> tuple[Tensor, Tensor]:
    """Keep all prefix tokens and, for each image, another random share 1 - rate of its patches, at least one.

    Returns the tokens that are left and their indices, [B, N].
    """
    batch, tokens, dim = x_BND.shape
    patches = tokens - prefix
    kept = max(1, int(patches * (1 - rate)))
    order = torch.rand(batch, patches, device=x_BND.device).argsort(dim=1)[:, :kept] + prefix
    first = torch.arange(prefix, device=x_BND.device).expand(batch, -1)
    keep_BN = torch.cat([first, order], dim=1)
    return x_BND.gather(1, keep_BN.unsqueeze(-1).expand(-1, -1, dim)), keep_BN
