"""Closed-form cost of a Vision Transformer, exact for every option. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Literal

from vit_scale.models.variants import Variant

Checkpointing = Literal["none", "selective", "full"]
BLOCK_PARTS = ("attention_projections", "attention_matmuls", "mlp")


def macs_by_part(variant: Variant) -> dict[str, int]:
    """MACs per image of a forward pass, by part."""
    patches = variant.grid[0] * variant.grid[1]
    tokens = patches + variant.num_prefix_tokens
    patch_pixels = variant.in_chans * variant.patch_size[0] * variant.patch_size[1]
    patch = patches * patch_pixels * variant.embed_dim
    return {"patch": patch, **_blocks_macs(variant, tokens), "head": head_macs(variant, tokens)}


def _blocks_macs(variant: Variant, tokens: int) -> dict[str, int]:
    """MACs of all blocks, each computing all tokens, by part."""
    blocks = [block_macs(variant, index, tokens) for index in range(variant.depth)]
    return {part: sum(block[part] for block in blocks) for part in BLOCK_PARTS}


def block_macs(variant: Variant, index: int, tokens: int, first: int | None = None) -> dict[str, int]:
    """MACs of the block with this index for `tokens` tokens, by part.

    `first`: number of leading tokens to compute, None for all.
    """
    dim, matrices = variant.embed_dim, 2 if variant.mlp == "gelu" else 3
    computed = tokens if first is None else first
    return {
        "attention_projections": 2 * (tokens + computed) * dim**2,
        "attention_matmuls": _attention_macs(variant, index, tokens, first),
        "mlp": computed * matrices * dim * variant.mlp_width,
    }


def _attention_macs(variant: Variant, index: int, tokens: int, first: int | None) -> int:
    """MACs between queries, keys and values, by the kind of attention of this block."""
    dim, features = variant.embed_dim, variant.num_random_features
    computed = tokens if first is None else first
    if variant.attention_of(index) == "linear":
        # Keys to values, queries to their product, and the normalization of each query and head.
        products = features * ((tokens + computed) * dim + computed * variant.num_heads)
        return feature_macs(variant, index, tokens, first) + products
    return 2 * dim * (computed * tokens if first is not None else attended_pairs(variant, index, tokens))


def attended_pairs(variant: Variant, index: int, tokens: int) -> int:
    """Pairs of query and key that softmax attention computes: those of each group, and prefix tokens with all."""
    groups = groups_of(variant, index)
    if groups is None:
        return tokens**2
    prefix = variant.num_prefix_tokens
    return prefix * tokens + sum(number * size * (prefix + size) for size, number in groups.items())


def groups_of(variant: Variant, index: int) -> dict[int, int] | None:
    """Number of groups of patches by their size in the block with this index; None: all tokens attend to all."""
    grouping = variant.grouping_of(index)
    return None if grouping is None or grouping.is_one_group(variant.grid) else grouping.sizes(variant.grid)


def feature_macs(variant: Variant, index: int, tokens: int, first: int | None = None) -> int:
    """MACs that map queries and keys to the random features of linear attention, which have no gradient."""
    if variant.attention_of(index) != "linear":
        return 0
    return (tokens + (tokens if first is None else first)) * variant.num_random_features * variant.embed_dim


def linear_attention_min_tokens(variant: Variant) -> int:
    """Smallest number of tokens for which linear attention has fewer MACs than softmax attention of all tokens."""
    features, heads, dim = variant.num_random_features, variant.num_heads, variant.embed_dim
    return (4 * features * dim + features * heads) // (2 * dim) + 1


def computed_tokens(variant: Variant) -> Iterator[int | None]:
    """Number of tokens each block computes, None for all: the last block computes only the tokens the head reads."""
    return (variant.head_tokens if i == variant.depth - 1 else None for i in range(variant.depth))


def norm_elements(variant: Variant) -> int:
    """LayerNorm elements per image of a forward pass."""
    tokens = variant.grid[0] * variant.grid[1] + variant.num_prefix_tokens
    norms_per_block = 4 if variant.qk_norm else 2
    last = 1 if variant.norm_after_pool and variant.pool != "tokens" else tokens
    return (norms_per_block * variant.depth * tokens + last) * variant.embed_dim


def training_tokens(variant: Variant, patch_dropout: float) -> int:
    """Number of tokens per block in training: patch dropout keeps at least one patch."""
    return max(1, int(variant.grid[0] * variant.grid[1] * (1 - patch_dropout))) + variant.num_prefix_tokens


def computed_fraction(rate: float, mode: Literal["skip", "mask"], batch: int | None = None) -> float:
    """Fraction of images for which stochastic depth with `rate` computes a branch; `skip` rounds up to whole images."""
    if mode == "mask":
        return 1.0
    return 1 - rate if batch is None else max(1, ceil(batch * (1 - rate) - 1e-9)) / batch


def recomputed_blocks(depth: int, checkpointing: Checkpointing) -> Iterator[bool]:
    """Whether each block's forward pass is recomputed in the backward pass."""
    return (checkpointing == "full" or (checkpointing == "selective" and i % 2 == 0) for i in range(depth))


def last_matmul_macs(variant: Variant, tokens: int) -> int:
    """MACs of a block's last matmul for `tokens` tokens if the backward pass does not need its result, otherwise 0.

    torch's checkpointing stops recomputing a block once it has all tensors that the backward pass needs: before this
    matmul, unless LayerScale or dropout follow it.
    """
    needed = variant.layer_scale is not None or variant.dropout > 0
    return 0 if needed else tokens * variant.embed_dim * variant.mlp_width


def mae_decoder_macs(variant: Variant, encoder_dim: int, mask_ratio: float) -> dict[str, int]:
    """MACs per image of the decoder of a masked autoencoder: `head` predicts pixels, `other` maps the encoder's tokens.

    Its blocks compute all tokens, the last layer the patches alone.
    """
    patches = variant.grid[0] * variant.grid[1]
    tokens = patches + variant.num_prefix_tokens
    embedded = int(patches * (1 - mask_ratio)) + variant.num_prefix_tokens
    ends = {"head": patches * variant.embed_dim * variant.num_classes}
    return _blocks_macs(variant, tokens) | ends | {"other": embedded * encoder_dim * variant.embed_dim}


def head_macs(variant: Variant, tokens: int) -> int:
    """MACs of the head (both heads for a distilled model)."""
    heads = 2 if variant.distilled else 1
    return heads * variant.embed_dim * variant.num_classes * (tokens if variant.pool == "tokens" else 1)
