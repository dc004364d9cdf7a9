"""Multi-head self-attention, its kernels, and the attention weights themselves.

Shapes: B batch, N tokens, Q of them that ask, D token width, H heads, K head width (D = H K).
"""

import contextlib
import warnings
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_scale.errors import UserError
from vit_scale.kernels import cpu_attention
from vit_scale.kernels.onednn import Linear, linear
from vit_scale.models.dropout import Dropout
from vit_scale.models.pos_embed import RelativeBias, RotaryEmbedding

NORM_EPS = 1e-6

Backend = Literal["auto", "flash", "efficient", "cudnn", "math", "explicit"]
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class QueriesKeysValues(Linear):
    """One matrix that projects tokens to queries, keys and values."""

    def __init__(self, dim: int, *, bias: bool = True) -> None:
        super().__init__(dim, 3 * dim, bias=bias)

    def forward(self, x_BND: Tensor, queries: int | None = None) -> Any:
        """[B, N, 3 D]; or, for queries of that many first tokens only, [B, Q, D] and keys and values, [B, N, 2 D]."""
        if queries is None:
            return super().forward(x_BND)
        dim = x_BND.shape[-1]
        q_bias, kv_bias = (None, None) if self.bias is None else (self.bias[:dim], self.bias[dim:])
        return linear(x_BND[:, :queries], self.weight[:dim], q_bias), linear(x_BND, self.weight[dim:], kv_bias)


class Attention(nn.Module):
    """Self-attention with one packed projection for queries, keys and values."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
        attn_dropout: float = 0.0,
        position: RotaryEmbedding | RelativeBias | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_dropout = attn_dropout
        self.backend = backend
        self.qkv = QueriesKeysValues(dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.rope = position if isinstance(position, RotaryEmbedding) else None
        self.rel_pos = position if isinstance(position, RelativeBias) else None
        self.proj = Linear(dim, dim, bias=bias)
        self.proj_drop = Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BND: Tensor, keep_BN: Tensor | None = None, queries: int | None = None) -> Tensor:
        """Every token attends to every other, or only the first `queries` do; `keep_BN`: what patch dropout left."""
        if queries is None and self._is_plain() and cpu_attention.runs(x_BND, self.num_heads):
            y_BQD = cpu_attention.attend(self.qkv(x_BND), self.num_heads)
        else:
            y_BQD = self._attend(x_BND, keep_BN, queries).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(y_BQD))

    def weights(self, x_BND: Tensor) -> Tensor:
        """The attention weights [B, H, N, N], computed step by step; each row sums to one."""
        q_BHNK, k_BHNK, _ = self._heads(x_BND, None)
        return _softmax_weights(q_BHNK, k_BHNK, self._bias(q_BHNK, None))

    def _is_plain(self) -> bool:
        """Nothing but softmax attention is asked for, by the fastest kernel."""
        simple = self.rope is None and self.rel_pos is None and isinstance(self.q_norm, nn.Identity)
        return simple and self.backend == "auto" and not (self.training and self.attn_dropout)

    def _attend(self, x_BND: Tensor, keep_BN: Tensor | None, queries: int | None) -> Tensor:
        q_BHQK, k_BHNK, v_BHNK = self._heads(x_BND, keep_BN, queries)
        bias = self._bias(q_BHQK, keep_BN)
        dropout = self.attn_dropout if self.training else 0.0
        if self.backend == "explicit":
            return F.dropout(_softmax_weights(q_BHQK, k_BHNK, bias), dropout) @ v_BHNK
        with self._kernel():
            return F.scaled_dot_product_attention(q_BHQK, k_BHNK, v_BHNK, attn_mask=bias, dropout_p=dropout)

    def _heads(
        self, x_BND: Tensor, keep_BN: Tensor | None, queries: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Taken apart along the dimension where they lie: the backward pass then puts them together in one copy.
        if queries is None:
            q_BQD, k_BND, v_BND = self.qkv(x_BND).unflatten(-1, (3, -1)).unbind(2)
        else:
            q_BQD, kv_BNC = self.qkv(x_BND, queries)
            k_BND, v_BND = kv_BNC.unflatten(-1, (2, -1)).unbind(2)
        heads = (self.num_heads, self.head_dim)
        q_BHQK, k_BHNK, v_BHNK = (part.unflatten(-1, heads).transpose(1, 2) for part in (q_BQD, k_BND, v_BND))
        q_BHQK, k_BHNK = self.q_norm(q_BHQK), self.k_norm(k_BHNK)
        if self.rope is not None:
            q_BHQK, k_BHNK = self.rope(q_BHQK, keep_BN), self.rope(k_BHNK, keep_BN)
        # Under autocast a norm answers in float32; the kernels want one type.
        return q_BHQK.to(v_BHNK.dtype), k_BHNK.to(v_BHNK.dtype), v_BHNK

    def _bias(self, q_BHQK: Tensor, keep_BN: Tensor | None) -> Tensor | None:
        return None if self.rel_pos is None else self.rel_pos(keep_BN)[:, :, : q_BHQK.shape[2]].to(q_BHQK.dtype)

    def _kernel(self) -> contextlib.AbstractContextManager[None]:
        # Here and not around the whole model: activation checkpointing runs blocks again outside the model's forward.
        return contextlib.nullcontext() if self.backend == "auto" else sdpa_kernel(_KERNELS[self.backend])


def _softmax_weights(q_BHQK: Tensor, k_BHNK: Tensor, bias: Tensor | None) -> Tensor:
    scores_BHQN = (q_BHQK * q_BHQK.shape[-1] ** -0.5) @ k_BHNK.transpose(-2, -1)
    return (scores_BHQN if bias is None else scores_BHQN + bias).softmax(dim=-1)


def check_attention_backend(
    backend: Backend,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    dropout: float = 0.0,
    bias: bool = False,
) -> None:
    """Raise UserError unless this kernel runs forward and backward on this device: a tiny one is tried."""
    if backend in ("auto", "explicit"):
        return
    device = torch.device(device)
    try:
        q, k, v = (torch.zeros(1, 1, 8, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = torch.zeros(1, 1, 8, 8, device=device, dtype=dtype, requires_grad=True) if bias else None
        with sdpa_kernel(_KERNELS[backend]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of each reason before it raises.
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
            torch.autograd.grad(y.sum(), [q, k, v] if mask is None else [q, k, v, mask])
    except (RuntimeError, NotImplementedError) as error:
        asked = [f"on {device.type}", f"in {str(dtype).removeprefix('torch.')}", f"for heads of {head_dim}"]
        asked += ["with dropout"] if dropout else []
        asked += ["with a relative bias"] if bias else []
        raise UserError(
            f"model.attention = {backend}: this kernel does not run {' '.join(asked)}. "
            "Use auto (the fastest that does), math or explicit."
        ) from error
