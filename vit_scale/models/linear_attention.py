"""Linear attention by random features: FAVOR+ (Choromanski et al. 2021, "Rethinking Attention with Performers",
arXiv:2009.14794).

exp(q k) is the expected value of phi(q) phi(k) with phi(x) = exp(w x - |x|^2 / 2) / sqrt(M) over normal random w. The
sums over keys are then computed once for all queries: cost and memory are linear in the number of tokens.

Shapes: B batch, N tokens, Q tokens with a query, D token width, H heads, K head width, M random features.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from vit_scale.models.attention import Attention
from vit_scale.models.layers.token_groups import Grid


class LinearAttention(Attention):
    """Self-attention with positive orthogonal random features.

    The features are drawn once per block when the weights are initialized, and saved with the weights.
    """

    is_linear = True
    epsilon = 1e-6
    """Added to features that are at most 1, so that no query has a sum of weights of zero."""
    random_features: Tensor
    """Directions, [M, K]."""

    def __init__(self, dim: int, num_heads: int, *, random_features: int, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        # In the state dict, so that every copy of the model, such as a resumed or exported one, has the same.
        self.register_buffer("random_features", torch.zeros(random_features, self.head_dim))

    @torch.no_grad()
    def draw_features(self) -> None:
        """Draw the random features with torch's generator."""
        self.random_features.copy_(orthogonal_features(*self.random_features.shape))

    def attend(
        self, q_BQD: Tensor, k_BND: Tensor, v_BND: Tensor, keep_BN: Tensor | None = None, grid: Grid | None = None
    ) -> Tensor:
        """Return the weighted mean of values per query, [B, Q, D], before the output projection."""
        q_BHQK, k_BHNK, v_BHNK = self._heads_of(q_BQD, k_BND, v_BND, keep_BN)
        dtype = v_BHNK.dtype
        # Sums of exponentials over thousands of keys need fp32.
        with _without_autocast(q_BQD.device.type):
            q_BHQM, k_BHNM = self._features(q_BHQK, of_keys=False), self._features(k_BHNK, of_keys=True)
            y_BHQK = q_BHQM @ (k_BHNM.transpose(-2, -1) @ v_BHNK.to(q_BHQM.dtype))
            y_BHQK = y_BHQK / (q_BHQM @ k_BHNM.sum(dim=-2).unsqueeze(-1))
        return y_BHQK.to(dtype).transpose(1, 2).flatten(2)

    def weights(self, x_BND: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the attention weights [B, H, N, N] that the features imply; each row sums to one."""
        q_BHNK, k_BHNK, _ = self._heads_of(*self.split(self.qkv(x_BND)), None)
        weights_BHNN = self._features(q_BHNK, of_keys=False) @ self._features(k_BHNK, of_keys=True).transpose(-2, -1)
        return weights_BHNN / weights_BHNN.sum(dim=-1, keepdim=True)

    def _features(self, x_BHNK: Tensor, *, of_keys: bool) -> Tensor:
        """Return positive features whose products are, in expectation, proportional to exp(q k / sqrt(K))."""
        x_BHNK = x_BHNK.to(self.random_features.dtype) * self.head_dim**-0.25
        exponent_BHNM = x_BHNK @ self.random_features.T
        # A factor that is the same for all features of a query, or for all keys, cancels out.
        if of_keys:
            exponent_BHNM = exponent_BHNM - x_BHNK.square().sum(-1, keepdim=True) / 2
        largest = exponent_BHNM.detach().amax(dim=(-2, -1) if of_keys else -1, keepdim=True)
        return (exponent_BHNM - largest).exp() + self.epsilon


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    # The meta device, on which models are counted, has no autocast.
    has_autocast = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if has_autocast else nullcontext()


def orthogonal_features(features: int, width: int) -> Tensor:
    """Draw directions [M, K]: orthogonal in blocks of K, each uniformly distributed, as long as normal vectors."""
    blocks = []
    for _ in range(-(-features // width)):
        directions_KK, triangle_KK = torch.linalg.qr(torch.randn(width, width))
        blocks.append((directions_KK * triangle_KK.diagonal().sign()).T)  # The sign of each is arbitrary in QR.
    return torch.cat(blocks)[:features] * torch.randn(features, width).norm(dim=1, keepdim=True)
