"""Linear attention by random features: FAVOR+ (Choromanski et al. 2021, "Rethinking Attention with Performers",
arXiv:2009.14794).

exp(q k) is the expected value of phi(q) phi(k) with phi(x) = exp(w x - |x|^2 / 2) / sqrt(M) over normal random w. The
sums over keys are then computed once for all queries: cost and memory are linear in the number of tokens.

Shapes: B batch, N tokens, Q tokens with a query, D token width, H heads, K head width, M random features.
"""

from typing import Any

import torch
from torch import Tensor

from vit_scale.models.attention import Attention
from vit_scale.models.layers.token_groups import Grid


class LinearAttention(Attention):
    """Self-attention with positive orthogonal random features.

    The features are drawn once per block when the weights are initialized, and saved with the weights.
    """

    random_features: Tensor
    """Directions, [M, K]."""

    def __init__(self, dim: int, num_heads: int, *, random_features: int, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        # In the state dict, so that every copy of the model, such as a resumed or exported one, has the same.
        self.register_buffer("random_features", torch.zeros(random_features, self.head_dim))

    def is_full(self, grid: Grid | None = None) -> bool:
        """Return False: this approximates softmax attention."""
        return False

    @torch.no_grad()
    def draw_features(self) -> None:
        """Draw the random features with torch's generator."""
        self.random_features.copy_(orthogonal_features(*self.random_features.shape))

    def attend(
        self, q_BQD: Tensor, k_BND: Tensor, v_BND: Tensor, keep_BN: Tensor | None = None, grid: Grid | None = None
    ) -> Tensor:
        """Return the weighted mean of values per query, [B, Q, D], before the output projection."""
        raise NotImplementedError

    def weights(self, x_BND: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the attention weights [B, H, N, N] that the features imply; each row sums to one."""
        raise NotImplementedError


def orthogonal_features(features: int, width: int) -> Tensor:
    """Draw directions [M, K]: orthogonal in blocks of K, with the lengths of normal vectors."""
    blocks = [torch.linalg.qr(torch.randn(width, width))[0].T for _ in range(-(-features // width))]
    return torch.cat(blocks)[:features] * torch.randn(features, width).norm(dim=1, keepdim=True)
