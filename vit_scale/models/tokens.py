"""Drop and pool tokens.

Shapes: B batch, N tokens, D token width.
"""

import torch
from torch import Tensor

from vit_scale.models.variants import Pool


def drop_patches(x_BND: Tensor, rate: float, prefix: int) -> tuple[Tensor, Tensor]:
    """Keep all prefix tokens and per image a random fraction 1 - rate of its patches, at least one.

    Returns the tokens that are kept and their indices, [B, N].
    """
    batch, tokens, dim = x_BND.shape
    patches = tokens - prefix
    kept = max(1, int(patches * (1 - rate)))
    order = torch.rand(batch, patches, device=x_BND.device).argsort(dim=1)[:, :kept] + prefix
    first = torch.arange(prefix, device=x_BND.device).expand(batch, -1)
    keep_BN = torch.cat([first, order], dim=1)
    return x_BND.gather(1, keep_BN.unsqueeze(-1).expand(-1, -1, dim)), keep_BN


def pool_tokens(x_BND: Tensor, pool: Pool, prefix: int) -> Tensor:
    """Return the class token, the mean or maximum of patch tokens [B, D], or every token [B, N, D]."""
    if pool == "cls":
        return x_BND[:, 0]
    if pool == "mean":
        return x_BND[:, prefix:].mean(dim=1)
    if pool == "max":
        return x_BND[:, prefix:].amax(dim=1)
    return x_BND
