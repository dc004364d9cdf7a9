"""The cost of a Vision Transformer in closed form, exact for every option. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Literal

from vit_scale.models.variants import Variant

Checkpointing = Literal["none", "selective", "full"]


def macs_by_part(variant: Variant) -> dict[str, int]:
    """MACs of one image's forward pass, by part."""
    patches = variant.grid[0] * variant.grid[1]
    tokens = patches + variant.num_prefix_tokens
    patch_pixels = variant.in_chans * variant.patch_size[0] * variant.patch_size[1]
    blocks = {part: variant.depth * macs for part, macs in block_macs(variant, tokens).items()}
    return {"patch": patches * patch_pixels * variant.embed_dim, **blocks, "head": head_macs(variant, tokens)}


def block_macs(variant: Variant, tokens: int, first: int | None = None) -> dict[str, int]:
    """MACs of one block for `tokens` tokens, by part; `first`: where only that many of its tokens are computed."""
    dim, matrices = variant.embed_dim, 2 if variant.mlp == "gelu" else 3
    computed = tokens if first is None else first
    return {
        "attention_projections": 2 * (tokens + computed) * dim**2,
        "attention_products": 2 * computed * tokens * dim,
        "mlp": computed * matrices * dim * variant.mlp_width,
    }


def computed_tokens(variant: Variant) -> Iterator[int | None]:
    """For each block how many tokens it computes, None for all: the last one only those that the head reads."""
    return (variant.head_tokens if i == variant.depth - 1 else None for i in range(variant.depth))


def norm_elements(variant: Variant) -> int:
    """Elements that go through a LayerNorm in one image's forward pass."""
    tokens = variant.grid[0] * variant.grid[1] + variant.num_prefix_tokens
    norms_per_block = 4 if variant.qk_norm else 2
    last = 1 if variant.norm_after_pool and variant.pool != "tokens" else tokens
    return (norms_per_block * variant.depth * tokens + last) * variant.embed_dim


def training_tokens(variant: Variant, patch_dropout: float) -> int:
    """Tokens that a block sees in training: patch dropout leaves at least one patch."""
    return max(1, int(variant.grid[0] * variant.grid[1] * (1 - patch_dropout))) + variant.num_prefix_tokens


def computed_share(rate: float, mode: Literal["skip", "mask"], batch: int | None = None) -> float:
    """Share of the images for which stochastic depth of `rate` computes a branch; `skip` rounds up to whole images."""
    if mode == "mask":
        return 1.0
    return 1 - rate if batch is None else max(1, ceil(batch * (1 - rate) - 1e-9)) / batch


def recomputed_blocks(depth: int, checkpointing: Checkpointing) -> Iterator[bool]:
    """For each block, whether its forward pass is repeated in the backward pass."""
    return (checkpointing == "full" or (checkpointing == "selective" and i % 2 == 0) for i in range(depth))


def last_product(variant: Variant, tokens: int) -> int:
    """MACs of a block's last product, of `tokens` tokens, if nothing in the backward pass needs its result, else 0.

    torch's checkpointing stops repeating a block once it has all that the backward pass needs: before this product,
    unless LayerScale or dropout come after it.
    """
    needed = variant.layer_scale is not None or variant.dropout > 0
    return 0 if needed else tokens * variant.embed_dim * variant.mlp_width


def head_macs(variant: Variant, tokens: int) -> int:
    """MACs of the head, or of both heads of a distilled model."""
    heads = 2 if variant.distilled else 1
    return heads * variant.embed_dim * variant.num_classes * (tokens if variant.pool == "tokens" else 1)
