"""A pre-norm transformer block.

Shapes: B batch, N tokens, D token width.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit_scale.kernels import Shortcut, fast_block
from vit_scale.models.attention import NORM_EPS, Attention, Kernel
from vit_scale.models.layers.drop_path import Draw, DropPath
from vit_scale.models.layers.mlp import Mlp, SwiGlu
from vit_scale.models.layers.pos_embed import RelativeBias, RotaryEmbedding
from vit_scale.models.layers.token_groups import Grid
from vit_scale.models.linear_attention import LinearAttention
from vit_scale.models.sparse_attention import GroupedAttention
from vit_scale.models.variants import Variant

Draws = tuple[Draw | None, Draw | None]
"""Of stochastic depth in attention and in the MLP."""


class LayerScale(nn.Module):
    """Scale channels by a learned `gamma` (Touvron et al. 2021, arXiv:2103.17239).

    It starts small, so that deep models start close to the identity.
    """

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), initial))

    def forward(self, x_BND: Tensor) -> Tensor:
        """Scale the last dimension."""
        return x_BND * self.gamma


class Block(nn.Module):
    """Attention and an MLP, each in a residual branch with LayerScale and stochastic depth."""

    def __init__(
        self,
        variant: Variant,
        index: int = 0,
        *,
        position: RotaryEmbedding | RelativeBias | None = None,
        drop_path: float = 0.0,
        drop_path_mode: Literal["skip", "mask"] = "skip",
        kernel: Kernel = "auto",
    ) -> None:
        super().__init__()
        dim = variant.embed_dim
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = _attention(variant, index, position, kernel)
        self.ls1 = _layer_scale(variant)
        self.drop_path1 = DropPath(drop_path, drop_path_mode)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        mlp_class = Mlp if variant.mlp == "gelu" else SwiGlu
        self.mlp = mlp_class(dim, variant.mlp_width, bias=variant.bias, dropout=variant.dropout)
        self.ls2 = _layer_scale(variant)
        self.drop_path2 = DropPath(drop_path, drop_path_mode)

    def forward(
        self,
        x_BND: Tensor,
        keep_BN: Tensor | None = None,
        shortcut: Shortcut | None = None,
        draws: Draws = (None, None),
        grid: Grid | None = None,
    ) -> Tensor:
        """Apply attention and MLP.

        `keep_BN`: indices of the tokens that patch dropout kept, for position embeddings inside attention.
        `shortcut`: how to compute the same faster; None: by the plain code.
        `draws`: those of stochastic depth; None: each branch draws its own.
        `grid`: rows and columns of patches if they are not the model's own and attention depends on them.
        """
        if shortcut is not None:
            return fast_block.forward(self, x_BND, keep_BN, shortcut, draws, grid)
        kept = () if keep_BN is None else (keep_BN,)
        x_BND = self.drop_path1(x_BND, partial(self._attention_branch, grid=grid), *kept, draw=draws[0])
        return self.drop_path2(x_BND, self._mlp_branch, draw=draws[1])

    def draw(self, x_BND: Tensor) -> Draws:
        """Return draws for `forward` if the block is compiled: blocks of any drop rate then share its graph."""
        if self._compiled_call_impl is None:
            return None, None
        return self.drop_path1.draw(x_BND), self.drop_path2.draw(x_BND)

    def _attention_branch(self, x_BND: Tensor, *kept: Tensor, grid: Grid | None) -> Tensor:
        return self.ls1(self.attn(self.norm1(x_BND), *kept, **({} if grid is None else {"grid": grid})))

    def _mlp_branch(self, x_BND: Tensor) -> Tensor:
        return self.ls2(self.mlp(self.norm2(x_BND)))


def run_block(
    block: nn.Module,
    x_BND: Tensor,
    keep_BN: Tensor | None,
    shortcut: Shortcut | None,
    *,
    grid: Grid | None = None,
    recompute: bool = False,
) -> Tensor:
    """Run a block, or a module in place of one; `recompute`: compute its activations again in the backward pass.

    `grid`: rows and columns of patches if they are not the model's own.
    """
    draws = block.draw(x_BND) if isinstance(block, Block) else (None, None)
    # A hook on a block, or a module in place of one, gets the tokens only, as in timm.
    inputs: tuple[Any, ...] = (x_BND,) if keep_BN is None and shortcut is None else (x_BND, keep_BN, shortcut)
    if draws != (None, None):
        inputs = (x_BND, keep_BN, shortcut, draws)
    if grid is not None and isinstance(block, Block) and isinstance(block.attn, GroupedAttention):
        inputs = (x_BND, keep_BN, shortcut, draws, grid)
    if recompute and block.training and torch.is_grad_enabled():  # A frozen block is never in training mode.
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=True)
    return block(*inputs)


def is_recomputed(index: int, mode: Literal["none", "selective", "full"]) -> bool:
    """Return whether activation checkpointing recomputes the block of this index."""
    return mode == "full" or (mode == "selective" and index % 2 == 0)


def _attention(
    variant: Variant, index: int, position: RotaryEmbedding | RelativeBias | None, kernel: Kernel
) -> Attention:
    """Return the attention of the block with this index."""
    options: dict[str, Any] = {
        "qkv_bias": variant.qkv_bias,
        "bias": variant.bias,
        "qk_norm": variant.qk_norm,
        "dropout": variant.dropout,
        "attn_dropout": variant.attn_dropout,
        "position": position,
        "kernel": kernel,
    }
    dim, heads, grouping = variant.embed_dim, variant.num_heads, variant.grouping_of(index)
    if grouping is not None:
        return GroupedAttention(
            dim, heads, grid=variant.grid, prefix=variant.num_prefix_tokens, grouping=grouping, **options
        )
    if variant.attention_of(index) == "linear":
        return LinearAttention(dim, heads, random_features=variant.num_random_features, **options)
    return Attention(dim, heads, **options)


def _layer_scale(variant: Variant) -> nn.Module:
    return nn.Identity() if variant.layer_scale is None else LayerScale(variant.embed_dim, variant.layer_scale)
