"""Residual sums that overwrite the output of the branch instead of allocating another tensor.

Shapes: B batch, K samples that are computed, N tokens, D token width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def add_branch_(
    drop_path: Any,
    x_BND: Tensor,
    branch: Callable[..., Tensor],
    *per_sample: Tensor | None,
    draw: Any = None,
    overwrite_x: bool = False,
) -> Tensor:
    """Return `x + branch(x)` as the module `drop_path` does, with the same random draws.

    In training the sum overwrites the output of the branch: its last layer (linear, dropout or LayerScale) does not
    need it for the backward pass. With `overwrite_x`, stochastic depth overwrites x instead: only for an x that
    neither autograd, nor activation checkpointing, nor the caller refers to.

    The branch may return the leading tokens only; the sum then has no others. `draw`: of a compiled block, which
    overwrites nothing.
    """
    if draw is not None:
        return drop_path.add_drawn(draw, x_BND, branch, *per_sample)
    if drop_path.training and drop_path.rate and drop_path.mode == "skip":
        return _add_kept_samples_(drop_path, x_BND, branch, *per_sample, overwrite_x=overwrite_x)
    y_BND = branch(x_BND, *per_sample)
    x_BND = _leading_tokens(x_BND, y_BND.shape[1])
    if not drop_path.training:
        return x_BND + y_BND
    if drop_path.rate == 0:
        return y_BND.add_(x_BND) if y_BND.dtype == x_BND.dtype else x_BND + y_BND
    return x_BND + y_BND * drop_path.draw_mask(x_BND)


def _add_kept_samples_(
    drop_path: Any, x_BND: Tensor, branch: Callable[..., Tensor], *per_sample: Tensor | None, overwrite_x: bool
) -> Tensor:
    kept_K, counts_K11 = drop_path.draw_kept(x_BND)
    y_KND = branch(*(None if t is None else t.index_select(0, kept_K) for t in (x_BND, *per_sample)))
    x_BND = _leading_tokens(x_BND, y_KND.shape[1])
    if counts_K11 is not None:
        y_KND = y_KND.mul_(counts_K11)
    scale = 1 / (1 - drop_path.rate)
    if torch.compiler.is_compiling():
        return x_BND.index_add(0, kept_K, y_KND.to(x_BND.dtype), alpha=scale)
    return _AddKept.apply(x_BND, y_KND.to(x_BND.dtype), kept_K, scale, overwrite_x)


def _leading_tokens(x_BND: Tensor, tokens: int) -> Tensor:
    """Return x unsliced if it has no more tokens: autograd would copy a slice."""
    return x_BND if x_BND.shape[1] == tokens else x_BND[:, :tokens]


class _AddKept(torch.autograd.Function):
    """Add `scale` times y to the samples `kept_K` of x; torch's own index_add would save y for its gradient."""

    @staticmethod
    def forward(ctx: Any, x_BND: Tensor, y_KND: Tensor, kept_K: Tensor, scale: float, overwrite_x: bool) -> Tensor:
        ctx.save_for_backward(kept_K)
        ctx.scale = scale
        if not overwrite_x:
            return x_BND.index_add(0, kept_K, y_KND, alpha=scale)
        ctx.mark_dirty(x_BND)
        return x_BND.index_add_(0, kept_K, y_KND, alpha=scale)

    @staticmethod
    def backward(ctx: Any, grad_BND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (kept_K,) = ctx.saved_tensors
        return grad_BND, grad_BND.index_select(0, kept_K).mul_(ctx.scale), None, None, None
