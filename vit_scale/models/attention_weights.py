"""Attention weights of a ViT, ours or timm's, and maps of them over the image.

Shapes: B batch, C channels, H W pixels, N tokens (P prefix tokens, then patches), D token width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vit_scale.errors import UserError
from vit_scale.models.attention import Attention
from vit_scale.models.block import run_block
from vit_scale.models.layers.token_groups import Grid
from vit_scale.models.vit import VisionTransformer

Weights = Callable[[Tensor, Grid | None], Tensor]
"""Maps the normalized input of a block to its attention weights [B, heads, N, N].

Rows and columns of patches are the second argument if they are not the model's own.
"""


@torch.no_grad()
def attention_weights(model: nn.Module, x_BCHW: Tensor, *, start: int = 0) -> Iterator[Tensor]:
    """Yield the attention weights [B, heads, N, N] of each block from index `start` on, as in evaluation.

    Each row sums to one. Only one block's weights are in memory at a time. Works with fused kernels, compiled blocks,
    any image size that the model accepts, and ZeRO-3, where every rank must iterate to the end. Raises `UserError` for
    a model without plain attention blocks.
    """
    blocks = _attention_blocks(model)
    if blocks is None:
        raise UserError(f"attention_weights: {type(model).__name__} has no plain ViT attention blocks.")
    chosen = blocks[start:]
    x_BND = _input_of(model, chosen[0][0], x_BCHW)
    previous, grid = None, _other_grid(model, x_BCHW)
    for block, weights_of in chosen:
        # The model is in another state only while it computes, not while the caller uses the weights.
        with evaluation_mode(model):
            x_BND = x_BND if previous is None else run_block(previous, x_BND, None, None, grid=grid)
            weights_BHNN = weights_of(block.norm1(x_BND), grid)
        yield weights_BHNN
        del weights_BHNN  # Freed before the next block's are computed, unless the caller keeps them.
        previous = block


@torch.no_grad()
def attention_maps(model: nn.Module, x_BCHW: Tensor) -> Tensor | None:
    """Return how much of the last block's attention each patch receives, [B, rows, columns]; each map sums to one.

    This is the mean over heads, of the class token's query, or of all patches' queries if the head does not read a
    class token. None for a model without plain ViT attention blocks. Under ZeRO-3 every rank must call it.
    """
    if _attention_blocks(model) is None:
        return None
    (weights_BHNN,) = attention_weights(model, x_BCHW, start=-1)
    return _as_maps(model, weights_BHNN.float().mean(1), (x_BCHW.shape[-2], x_BCHW.shape[-1]))


def has_attention_weights(model: nn.Module) -> bool:
    """Return whether `attention_weights` works with a model."""
    return _attention_blocks(model) is not None


def _attention_blocks(model: nn.Module) -> list[tuple[Any, Weights]] | None:
    """Return each block with the function that computes its weights; None if there is a block of another kind."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential)) or not len(blocks):
        return None
    found = [(block, _weights_of(block)) for block in blocks]
    return [(block, weights) for block, weights in found if weights] if all(w for _, w in found) else None


def _weights_of(block: Any) -> Weights | None:
    attention = getattr(block, "attn", None)
    if isinstance(attention, Attention):
        return attention.weights
    from timm.layers.attention import Attention as TimmAttention
    from timm.models.vision_transformer import Block as TimmBlock

    if type(block) is TimmBlock and type(attention) is TimmAttention:
        return lambda x_BND, _grid: _timm_weights(attention, x_BND)
    return None


def _other_grid(model: Any, x_BCHW: Tensor) -> Grid | None:
    """Return rows and columns of patches of these images, if they are not those of one of our models."""
    if not isinstance(model, VisionTransformer):
        return None
    rows, columns = model.patch_size
    grid = x_BCHW.shape[2] // rows, x_BCHW.shape[3] // columns
    return None if grid == model.variant.grid else grid


def _timm_weights(attention: Any, x_BND: Tensor) -> Tensor:
    qkv = attention.qkv(x_BND).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q_BHNK, k_BHNK = attention.q_norm(qkv[0]), attention.k_norm(qkv[1])
    return (q_BHNK @ k_BHNK.transpose(-2, -1) * attention.scale).softmax(dim=-1)


def _input_of(model: nn.Module, block: nn.Module, x_BCHW: Tensor) -> Tensor:
    """Return the tokens that `block` receives, by running the complete model: ZeRO-3 gathers its tokens only then."""
    seen: list[Tensor] = []
    handle = block.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        with evaluation_mode(model):
            model(x_BCHW)
    finally:
        handle.remove()
    return seen[0]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and compiled modules back to the code that was written."""
    modules = [(module, module.training, module._compiled_call_impl) for module in model.modules()]
    model.eval()
    for module, _, _ in modules:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, training, compiled in modules:
            module.training, module._compiled_call_impl = training, compiled


def _as_maps(model: nn.Module, weights_BNN: Tensor, size: tuple[int, int]) -> Tensor | None:
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    patch = getattr(model, "patch_size", None)
    if patch is None:
        return None
    rows, columns = size[0] // patch[0], size[1] // patch[1]
    if weights_BNN.shape[-1] != prefix + rows * columns:
        return None
    queries = weights_BNN[:, :1] if prefix and reads_class_token(model) else weights_BNN[:, prefix:]
    patches = queries.mean(1)[:, prefix:]
    return (patches / patches.sum(1, keepdim=True)).view(-1, rows, columns)


def reads_class_token(model: nn.Module) -> bool:
    """Return whether the head reads the first token."""
    pool = getattr(getattr(model, "variant", None), "pool", None) or getattr(model, "global_pool", "")
    return pool in ("cls", "token") and getattr(model, "cls_token", None) is not None
