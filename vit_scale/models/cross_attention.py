"""Multi-head cross attention: queries of one sequence read another, as in the decoders of segmentation and detection.

Shapes: B batch, Q queries, N tokens that are read, D width of queries, C width of tokens, H heads, K head width
(D = H K).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_scale.models.attention import NORM_EPS, Kernel, backend_of
from vit_scale.models.layers.dropout import Dropout


class CrossAttention(nn.Module):
    """Attention from queries to tokens, with separate projections for queries, keys and values."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        token_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
        kernel: Kernel = "auto",
    ) -> None:
        """`token_dim`: width of the tokens that are read; None: `dim`."""
        super().__init__()
        token_dim = token_dim or dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_dropout = attn_dropout
        self.kernel = kernel
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(token_dim, dim, bias=bias)
        self.v = nn.Linear(token_dim, dim, bias=bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=bias)
        self.proj_drop = Dropout(dropout) if dropout else nn.Identity()

    def forward(
        self,
        x_BQD: Tensor,
        key_BNC: Tensor,
        value_BNC: Tensor | None = None,
        *,
        valid_BN: Tensor | None = None,
        mask_BQN: Tensor | None = None,
    ) -> Tensor:
        """Return what each query reads, [B, Q, D].

        `value_BNC`: the tokens where they differ from `key_BNC`, to which a decoder adds positions; None: the same.
        `valid_BN`: True for tokens that are not padding. `mask_BQN`: True where a query may attend to a token. A query
        that may attend to no token reads zeros, which the projection maps to its bias.
        """
        q_BHQK, k_BHNK = self._queries_and_keys(x_BQD, key_BNC)
        v_BHNK = self._heads(self.v(key_BNC if value_BNC is None else value_BNC))
        # Under autocast a norm returns float32; the kernels require a single dtype.
        q_BHQK, k_BHNK = q_BHQK.to(v_BHNK.dtype), k_BHNK.to(v_BHNK.dtype)
        allowed = _allowed(valid_BN, mask_BQN)
        dropout = self.attn_dropout if self.training else 0.0
        if self.kernel == "explicit":
            y_BHQK = F.dropout(_masked_softmax(q_BHQK, k_BHNK, allowed), dropout) @ v_BHNK
        else:
            with backend_of(self.kernel):
                y_BHQK = F.scaled_dot_product_attention(q_BHQK, k_BHNK, v_BHNK, attn_mask=allowed, dropout_p=dropout)
        return self.proj_drop(self.proj(y_BHQK.transpose(1, 2).flatten(2)))

    def weights(
        self, x_BQD: Tensor, key_BNC: Tensor, *, valid_BN: Tensor | None = None, mask_BQN: Tensor | None = None
    ) -> Tensor:
        """Return the attention weights [B, H, Q, N], computed explicitly; each row sums to one, or zero if masked."""
        return _masked_softmax(*self._queries_and_keys(x_BQD, key_BNC), _allowed(valid_BN, mask_BQN))

    def _queries_and_keys(self, x_BQD: Tensor, key_BNC: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(self._heads(self.q(x_BQD))), self.k_norm(self._heads(self.k(key_BNC)))

    def _heads(self, x_BND: Tensor) -> Tensor:
        return x_BND.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


def _allowed(valid_BN: Tensor | None, mask_BQN: Tensor | None) -> Tensor | None:
    """Combine both masks into one that broadcasts to [B, H, Q, N]."""
    valid = None if valid_BN is None else valid_BN[:, None, None, :]
    mask = None if mask_BQN is None else mask_BQN[:, None, :, :]
    return valid if mask is None else mask if valid is None else valid & mask


def _masked_softmax(q_BHQK: Tensor, k_BHNK: Tensor, allowed: Tensor | None) -> Tensor:
    scores_BHQN = (q_BHQK * q_BHQK.shape[-1] ** -0.5) @ k_BHNK.transpose(-2, -1)
    if allowed is None:
        return scores_BHQN.softmax(dim=-1)
    # The smallest finite number instead of -inf, whose gradient is NaN in a row without any allowed token.
    weights_BHQN = scores_BHQN.masked_fill(~allowed, torch.finfo(scores_BHQN.dtype).min).softmax(dim=-1)
    return weights_BHQN.masked_fill(~allowed, 0.0)
