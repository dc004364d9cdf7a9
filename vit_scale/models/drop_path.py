"""Stochastic depth (Huang et al. 2016, arXiv:1603.09382): a residual branch is left out for some samples.

Shapes: B batch, K samples that are computed, N tokens, D token width.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """`x + branch(x)`, in training with the branch left out for a share `rate` of the samples.

    Both modes keep the branch of a sample with probability 1 - rate and then divide it by 1 - rate, so that its
    expected value and its variance are the same. `mask` computes every branch and zeroes some. `skip` gathers the
    samples that are kept and computes only those.

    B (1 - rate) is rarely whole; the number kept is one of the two whole numbers around it, so that its average is
    exactly that. On a CPU only those are computed. On a GPU K = ceil(B (1 - rate)) are, whatever is kept, and the last
    of them sometimes counts nothing: shapes never change from step to step, so that nothing recompiles and memory is
    the same. K >= 1 everywhere, so that every rank runs every module.
    """

    def __init__(self, rate: float, mode: Literal["skip", "mask"] = "skip", *, inplace: bool = False) -> None:
        super().__init__()
        self.rate = rate
        self.mode = mode
        # Only for an input that nobody else holds: neither autograd, nor activation checkpointing, nor the caller.
        self.inplace = inplace

    def forward(self, x_BND: Tensor, branch: Callable[..., Tensor], *per_sample: Tensor | None) -> Tensor:
        """Add the branch, whose result may be changed; `per_sample`: its further arguments, by sample as x is.

        A branch may answer for the first tokens only; the sum then has no others.
        """
        if self.training and self.rate and self.mode == "skip":
            return self._skip(x_BND, branch, *per_sample)
        y_BND = branch(x_BND, *per_sample)
        x_BND = _tokens_as_in(y_BND, x_BND)
        if not self.training:
            return x_BND + y_BND
        if self.rate == 0:
            # In place: the last layer of a branch (linear, dropout or LayerScale) does not need its output again.
            return y_BND.add_(x_BND) if y_BND.dtype == x_BND.dtype else x_BND + y_BND
        return x_BND + y_BND * self._mask(x_BND)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"rate={self.rate:.3f}, mode={self.mode}"

    def _mask(self, x_BND: Tensor) -> Tensor:
        keep = 1 - self.rate
        return x_BND.new_empty(x_BND.shape[0], 1, 1).bernoulli_(keep) / keep

    def _skip(self, x_BND: Tensor, branch: Callable[..., Tensor], *per_sample: Tensor | None) -> Tensor:
        kept_K, counts_K11 = draw_kept(x_BND, self.rate)
        arguments = [None if t is None else t.index_select(0, kept_K) for t in (x_BND, *per_sample)]
        y_KND = branch(*arguments)
        x_BND = _tokens_as_in(y_KND, x_BND)
        if counts_K11 is not None:
            y_KND = y_KND.mul_(counts_K11)
        if torch.compiler.is_compiling():
            return x_BND.index_add(0, kept_K, y_KND.to(x_BND.dtype), alpha=1 / (1 - self.rate))
        return _AddKept.apply(x_BND, y_KND.to(x_BND.dtype), kept_K, 1 / (1 - self.rate), self.inplace)


def _tokens_as_in(y_BND: Tensor, x_BND: Tensor) -> Tensor:
    """The first tokens of x, as many as y has; a slice only where it leaves something out, as autograd copies it."""
    return x_BND if x_BND.shape[1] == y_BND.shape[1] else x_BND[:, : y_BND.shape[1]]


class _AddKept(torch.autograd.Function):
    """x with `scale` times y added to the samples `kept_K`; torch's own index_add would keep y for its gradient."""

    @staticmethod
    def forward(ctx: Any, x_BND: Tensor, y_KND: Tensor, kept_K: Tensor, scale: float, inplace: bool) -> Tensor:
        ctx.save_for_backward(kept_K)
        ctx.scale = scale
        if not inplace:
            return x_BND.index_add(0, kept_K, y_KND, alpha=scale)
        ctx.mark_dirty(x_BND)
        return x_BND.index_add_(0, kept_K, y_KND, alpha=scale)

    @staticmethod
    def backward(ctx: Any, grad_BND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (kept_K,) = ctx.saved_tensors
        return grad_BND, grad_BND.index_select(0, kept_K).mul_(ctx.scale), None, None, None


def draw_kept(x_BND: Tensor, rate: float) -> tuple[Tensor, Tensor | None]:
    """Which samples are computed, and whether each counts (1 or 0); None where all do."""
    batch, device = x_BND.shape[0], x_BND.device
    computed = kept_samples(batch, rate)
    last_counts = torch.rand((), device=device) < batch * (1 - rate) - (computed - 1)
    # Not for a compiler's or a counter's stand-in of a tensor, which has no value to ask for.
    may_ask = device.type == "cpu" and type(x_BND) is Tensor and not torch.compiler.is_compiling()
    fewer = may_ask and (computed > 1 or bool(last_counts))
    if fewer:
        computed -= not last_counts
    kept_K = torch.randperm(batch, device=device)[:computed]
    if fewer:
        return kept_K, None
    counts_K11 = x_BND.new_ones(computed, 1, 1)
    counts_K11[-1] *= last_counts
    return kept_K, counts_K11


def kept_samples(batch: int, rate: float) -> int:
    """How many samples of a batch `skip` computes, at most on a CPU and always on a GPU."""
    # The small number keeps 10 * (1 - 0.1), a little over 9 in floating point, from becoming 10.
    return max(1, math.ceil(batch * (1 - rate) - 1e-6))


def drop_path_rates(rate: float, depth: int, schedule: Literal["linear", "uniform"]) -> list[float]:
    """The rate of each block: rising from 0 to `rate`, or the same everywhere."""
    if schedule == "uniform":
        return [rate] * depth
    return [rate * i / max(1, depth - 1) for i in range(depth)]
