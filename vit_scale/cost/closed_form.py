"""Closed-form cost of a Vision Transformer, exact for every option. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Literal

from vit_scale.models.variants import Variant

Checkpointing = Literal["none", "selective", "full"]


def macs_by_part(variant: Variant) -> dict[str, int]:
    """MACs per image of a forward pass, by part."""
    patches = variant.grid[0] * variant.grid[1]
    tokens = patches + variant.num_prefix_tokens
    patch_pixels = variant.in_chans * variant.patch_size[0] * variant.patch_size[1]
    blocks = {part: variant.depth * macs for part, macs in block_macs(variant, tokens).items()}
    return {"patch": patches * patch_pixels * variant.embed_dim, **blocks, "head": head_macs(variant, tokens)}


def block_macs(variant: Variant, tokens: int, first: int | None = None) -> dict[str, int]:
    """MACs of one block for `tokens` tokens, by part; `first`: number of tokens to compute, None for all."""
    dim, matrices = variant.embed_dim, 2 if variant.mlp == "gelu" else 3
    computed = tokens if first is None else first
    return {
        "attention_projections": 2 * (tokens + computed) * dim**2,
        "attention_matmuls": 2 * computed * tokens * dim,
        "mlp": computed * matrices * dim * variant.mlp_width,
    }


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
    blocks = {part: variant.depth * macs for part, macs in block_macs(variant, tokens).items()}
    ends = {"head": patches * variant.embed_dim * variant.num_classes}
    return blocks | ends | {"other": embedded * encoder_dim * variant.embed_dim}


def head_macs(variant: Variant, tokens: int) -> int:
    """MACs of the head (both heads for a distilled model)."""
    heads = 2 if variant.distilled else 1
    return heads * variant.embed_dim * variant.num_classes * (tokens if variant.pool == "tokens" else 1)
