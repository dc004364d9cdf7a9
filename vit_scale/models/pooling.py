"""From tokens to what the head sees.

Shapes: B batch, N tokens, D token width.
"""

from torch import Tensor

from vit_scale.models.variants import Pool


def pool_tokens(x_BND: Tensor, pool: Pool, prefix: int) -> Tensor:
    """The class token, the mean or the maximum of patch tokens [B, D], or every token [B, N, D]."""
    if pool == "cls":
        return x_BND[:, 0]
    if pool == "mean":
        return x_BND[:, prefix:].mean(dim=1)
    if pool == "max":
        return x_BND[:, prefix:].amax(dim=1)
    return x_BND
