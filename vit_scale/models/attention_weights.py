"""Where a model looks: the attention of its last block, as a map over the image.

Shapes: B batch, C channels, H W pixels, N tokens (P prefix tokens, then patches), D token width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vit_scale.models.attention import Attention


@torch.no_grad()
def attention_maps(model: nn.Module, x_BCHW: Tensor) -> Tensor | None:
    """How much of the last block's attention each patch gets, [B, rows, columns], each map summing to one.

    The mean over heads, asked by the class token, or by all patches where there is none. None for a model without
    such blocks. The model runs as it always does, so this works for fused kernels, compiled blocks and ZeRO-3, where
    all processes must call it.
    """
    block, weights_of = _last_attention(model)
    if block is None or weights_of is None:
        return None
    training = model.training
    model.eval()
    try:
        with _input_of(block) as seen:
            model(x_BCHW)
        weights_BNN = weights_of(block.norm1(seen[0])).float().mean(1)
    finally:
        model.train(training)
    return _as_maps(model, weights_BNN, (x_BCHW.shape[-2], x_BCHW.shape[-1]))


def _last_attention(model: nn.Module) -> tuple[Any, Callable[[Tensor], Tensor] | None]:
    """The last block, and what makes attention weights [B, heads, N, N] of its normalised input."""
    try:
        block: Any = model.blocks[-1]  # type: ignore[index]
        attention: Any = block.attn
    except (AttributeError, IndexError, KeyError, TypeError):
        return None, None
    if isinstance(attention, Attention):
        return block, attention.weights
    from timm.layers.attention import Attention as TimmAttention
    from timm.models.vision_transformer import Block as TimmBlock

    if type(block) is TimmBlock and type(attention) is TimmAttention:
        return block, lambda x_BND: _timm_weights(attention, x_BND)
    return None, None


def _timm_weights(attention: Any, x_BND: Tensor) -> Tensor:
    qkv = attention.qkv(x_BND).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q_BHNK, k_BHNK = attention.q_norm(qkv[0]), attention.k_norm(qkv[1])
    return (q_BHNK @ k_BHNK.transpose(-2, -1) * attention.scale).softmax(dim=-1)


@contextmanager
def _input_of(block: nn.Module) -> Iterator[list[Tensor]]:
    """Within this context the inputs of `block` are kept; a compiled block runs as it was written."""
    seen: list[Tensor] = []
    compiled, block._compiled_call_impl = block._compiled_call_impl, None
    handle = block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()
        block._compiled_call_impl = compiled


def _as_maps(model: nn.Module, weights_BNN: Tensor, size: tuple[int, int]) -> Tensor | None:
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    patch = getattr(model, "patch_size", None)
    if patch is None:
        return None
    rows, columns = size[0] // patch[0], size[1] // patch[1]
    if weights_BNN.shape[-1] != prefix + rows * columns:
        return None
    asked_by = weights_BNN[:, :1] if prefix and _has_class_token(model) else weights_BNN[:, prefix:]
    patches = asked_by.mean(1)[:, prefix:]
    return (patches / patches.sum(1, keepdim=True)).view(-1, rows, columns)


def _has_class_token(model: nn.Module) -> bool:
    """Whether the first token is what the head sees."""
    pool = getattr(getattr(model, "variant", None), "pool", None) or getattr(model, "global_pool", "")
    return pool in ("cls", "token") and getattr(model, "cls_token", None) is not None
