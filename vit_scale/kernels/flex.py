"""FlexAttention on GPUs for attention within groups of tokens: blocks of keys that no query attends to are skipped.

Shapes: B batch, N tokens (P prefix tokens, then patches), Q queries, G groups, S patches per group, D token width,
H heads, K head width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def attend(
    q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, indices_GS: Sequence[Tensor], inverse: Tensor, prefix: int
) -> Tensor:
    """Return the weighted mean of values per query, [B, N, D].

    `indices_GS`: the patches of each group, for each shape of groups; `inverse`: where their sequence has each patch.
    """
    mask, order_N, inverse_N = _plan(tuple(index_GS.shape for index_GS in indices_GS), indices_GS, inverse, prefix)
    # In the order of the groups, the keys of a group are in few blocks.
    q, k, v = (x_BHNK.index_select(2, order_N) for x_BHNK in (q_BHNK, k_BHNK, v_BHNK))
    y_BHNK = _flex_attention(q.device.type)(q, k, v, block_mask=mask)
    return y_BHNK.index_select(2, inverse_N).transpose(1, 2).flatten(2)


def _plan(
    shapes: tuple[torch.Size, ...], indices_GS: Sequence[Tensor], inverse: Tensor, prefix: int
) -> tuple[Any, Tensor, Tensor]:
    device = inverse.device
    first_P = torch.arange(prefix, device=device)
    order_N = torch.cat([first_P, *(index_GS.flatten() + prefix for index_GS in indices_GS)])
    return _block_mask(shapes, prefix, device), order_N, torch.cat([first_P, inverse + prefix])


@functools.lru_cache(maxsize=16)
def _block_mask(shapes: tuple[torch.Size, ...], prefix: int, device: torch.device) -> Any:
    """Return the mask of tokens in the order of the groups."""
    from torch.nn.attention.flex_attention import create_block_mask

    sizes = torch.tensor([size for groups, size in shapes for _ in range(groups)], device=device)
    number_G = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
    group_N = torch.cat([torch.full((prefix,), -1, device=device), number_G])

    def may_attend(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (group_N[query] == group_N[key]) | (query < prefix) | (key < prefix)

    return create_block_mask(may_attend, None, None, len(group_N), len(group_N), device=device)


@functools.cache
def _flex_attention(device_type: str) -> Any:
    """Return FlexAttention, compiled on a GPU: only then it is fast."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=False)
