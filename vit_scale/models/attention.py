"""Multi-head self-attention, and the attention weights themselves.

Shapes: B batch, N tokens, Q tokens with a query (all, or the leading ones), D token width, H heads, K head width
(D = H K).
"""

import contextlib
import warnings
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_scale.errors import UserError
from vit_scale.kernels.cpu_attention import Groups
from vit_scale.models.layers.dropout import Dropout
from vit_scale.models.layers.pos_embed import RelativeBias, RotaryEmbedding
from vit_scale.models.layers.token_groups import Grid

NORM_EPS = 1e-6

Kernel = Literal["auto", "flash", "efficient", "cudnn", "math", "explicit", "flex"]
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Attention(nn.Module):
    """Self-attention with one packed projection for queries, keys and values."""

    is_linear = False
    """Whether random features approximate the softmax."""

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
        kernel: Kernel = "auto",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_dropout = attn_dropout
        self.kernel = kernel
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.rope = position if isinstance(position, RotaryEmbedding) else None
        self.rel_pos = position if isinstance(position, RelativeBias) else None
        self.proj = nn.Linear(dim, dim, bias=bias)
        self.proj_drop = Dropout(dropout) if dropout else nn.Identity()

    def groups(self, grid: Grid | None = None) -> Groups | None:
        """Return the groups within which patches attend to each other; None: all to all."""
        return None

    def forward(self, x_BND: Tensor, keep_BN: Tensor | None = None, grid: Grid | None = None) -> Tensor:
        """Let every token attend to every other, or to those that the kind of attention provides.

        `keep_BN`: indices of the tokens that patch dropout kept. `grid`: rows and columns of patches if they are not
        the model's own.
        """
        y_BND = self.attend(*self.split(self.qkv(x_BND)), keep_BN, grid)
        return self.proj_drop(self.proj(y_BND))

    def split(self, qkv_BNC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split packed queries, keys and values [B, N, 3 D] into three [B, N, D]."""
        # Along the dimension where they lie: the backward pass then packs them in a single copy.
        q_BND, k_BND, v_BND = qkv_BNC.unflatten(-1, (3, -1)).unbind(2)
        return q_BND, k_BND, v_BND

    def attend(
        self, q_BQD: Tensor, k_BND: Tensor, v_BND: Tensor, keep_BN: Tensor | None = None, grid: Grid | None = None
    ) -> Tensor:
        """Return the weighted mean of values per query, [B, Q, D], before the output projection."""
        q_BHQK, k_BHNK, v_BHNK = self._heads_of(q_BQD, k_BND, v_BND, keep_BN)
        y_BHQK = self._softmax_attention(q_BHQK, k_BHNK, v_BHNK, self._bias(q_BHQK, keep_BN))
        return y_BHQK.transpose(1, 2).flatten(2)

    def _heads_of(
        self, q_BQD: Tensor, k_BND: Tensor, v_BND: Tensor, keep_BN: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_BHQK, k_BHNK = self._normalized_heads(q_BQD, k_BND, keep_BN)
        v_BHNK = self._heads(v_BND)
        # Under autocast a norm returns float32; the kernels require a single dtype.
        return q_BHQK.to(v_BHNK.dtype), k_BHNK.to(v_BHNK.dtype), v_BHNK

    def _softmax_attention(self, q_BHQK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, bias: Tensor | None) -> Tensor:
        dropout = self.attn_dropout if self.training else 0.0
        if self.kernel == "explicit":
            return F.dropout(softmax_weights(q_BHQK, k_BHNK, bias), dropout) @ v_BHNK
        with backend_of(self.kernel):
            return F.scaled_dot_product_attention(q_BHQK, k_BHNK, v_BHNK, attn_mask=bias, dropout_p=dropout)

    def weights(self, x_BND: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the attention weights [B, H, N, N], computed explicitly; each row sums to one."""
        q_BND, k_BND, _ = self.split(self.qkv(x_BND))
        q_BHNK, k_BHNK = self._normalized_heads(q_BND, k_BND, None)
        return softmax_weights(q_BHNK, k_BHNK, self._bias(q_BHNK, None))

    def _heads(self, x_BND: Tensor) -> Tensor:
        return x_BND.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _normalized_heads(self, q_BQD: Tensor, k_BND: Tensor, keep_BN: Tensor | None) -> tuple[Tensor, Tensor]:
        q_BHQK, k_BHNK = self.q_norm(self._heads(q_BQD)), self.k_norm(self._heads(k_BND))
        if self.rope is not None:
            q_BHQK, k_BHNK = self.rope(q_BHQK, keep_BN), self.rope(k_BHNK, keep_BN)
        return q_BHQK, k_BHNK

    def _bias(self, q_BHQK: Tensor, keep_BN: Tensor | None) -> Tensor | None:
        return None if self.rel_pos is None else self.rel_pos(keep_BN)[:, :, : q_BHQK.shape[2]].to(q_BHQK.dtype)


def backend_of(kernel: Kernel) -> contextlib.AbstractContextManager[None]:
    """Return a context in which scaled_dot_product_attention runs this kernel.

    Enter it in the layer, not around the whole model: activation checkpointing reruns blocks outside the model's
    forward pass.
    """
    return contextlib.nullcontext() if kernel in ("auto", "flex") else sdpa_kernel(_BACKENDS[kernel])


def softmax_weights(q_BHQK: Tensor, k_BHNK: Tensor, bias: Tensor | None) -> Tensor:
    """Return the softmax of scaled scores plus `bias`, [B, H, Q, N]."""
    scores_BHQN = (q_BHQK * q_BHQK.shape[-1] ** -0.5) @ k_BHNK.transpose(-2, -1)
    return (scores_BHQN if bias is None else scores_BHQN + bias).softmax(dim=-1)


def check_attention_kernel(
    kernel: Kernel,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    dropout: float = 0.0,
    bias: bool = False,
) -> None:
    """Raise `UserError` unless this kernel runs forward and backward on this device; tries it on a tiny input."""
    if kernel in ("auto", "explicit"):
        return
    device = torch.device(device)
    if kernel == "flex":
        _check_flex(device, dropout=dropout, bias=bias)
        return
    try:
        q, k, v = (torch.zeros(1, 1, 8, head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = torch.zeros(1, 1, 8, 8, device=device, dtype=dtype, requires_grad=True) if bias else None
        with sdpa_kernel(_BACKENDS[kernel]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about each reason before it raises.
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
            torch.autograd.grad(y.sum(), [q, k, v] if mask is None else [q, k, v, mask])
    except (RuntimeError, NotImplementedError) as error:
        needs = [f"on {device.type}", f"in {str(dtype).removeprefix('torch.')}", f"for head width {head_dim}"]
        needs += ["with dropout"] if dropout else []
        needs += ["with a relative bias"] if bias else []
        raise UserError(
            f"model.kernel = {kernel}: this kernel does not run {' '.join(needs)}. "
            "Use auto (the fastest available), math or explicit."
        ) from error


def _check_flex(device: torch.device, *, dropout: float, bias: bool) -> None:
    if device.type != "cuda":
        raise UserError(
            f"model.kernel = flex: FlexAttention has no backward pass on {device.type}, only on GPUs; use auto."
        )
    if dropout:
        raise UserError("model.kernel = flex and model.attn_dropout: FlexAttention has no dropout; use kernel=auto.")
    if bias:
        raise UserError("model.kernel = flex and model.pos_embed = relative exclude each other; use kernel=auto.")
