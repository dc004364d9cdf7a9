"""Stochastic depth (Huang et al. 2016, arXiv:1603.09382): a residual branch is left out for some samples.

Shapes: B batch, K samples that are computed, N tokens, D token width.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """`x + branch(x)`, in training with the branch left out for a share `rate` of the samples.

    Both modes keep the branch of a sample with probability 1 - rate and then divide it by 1 - rate, so that its
    expected value and its variance are the same. `mask` computes every branch and zeroes some. `skip` gathers the
    samples that are kept and computes only those.

    The number of samples computed, K = ceil(B (1 - rate)), depends on the batch size alone: shapes never change from
    step to step, nothing recompiles, and since K >= 1 every rank runs every module. B (1 - rate) is rarely whole, so
    the last of the K counts only with a probability equal to the fraction: on average, exactly B (1 - rate) are kept.
    """

    def __init__(self, rate: float, mode: Literal["skip", "mask"] = "skip", *, inplace: bool = False) -> None:
        super().__init__()
        self.rate = rate
        self.mode = mode
        # Only for an input that nobody else holds: neither autograd, nor activation checkpointing, nor the caller.
        self.inplace = inplace

    def forward(self, x_BND: Tensor, branch: Callable[..., Tensor], *per_sample: Tensor | None) -> Tensor:
        """Add the branch; `per_sample` are further arguments of the branch whose first dimension is the batch."""
        if not self.training or self.rate == 0:
            return x_BND + branch(x_BND, *per_sample)
        if self.mode == "mask":
            return x_BND + branch(x_BND, *per_sample) * self._mask(x_BND)
        return self._skip(x_BND, branch, *per_sample)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"rate={self.rate:.3f}, mode={self.mode}"

    def _mask(self, x_BND: Tensor) -> Tensor:
        keep = 1 - self.rate
        return x_BND.new_empty(x_BND.shape[0], 1, 1).bernoulli_(keep) / keep

    def _skip(self, x_BND: Tensor, branch: Callable[..., Tensor], *per_sample: Tensor | None) -> Tensor:
        kept_K, weight_K11 = draw_kept(x_BND, self.rate)
        arguments = [None if t is None else t.index_select(0, kept_K) for t in (x_BND, *per_sample)]
        # In place: the last layer of a branch (linear, dropout or LayerScale) does not need its output again.
        y_KND = branch(*arguments).mul_(weight_K11).to(x_BND.dtype)
        return x_BND.index_add_(0, kept_K, y_KND) if self.inplace else x_BND.index_add(0, kept_K, y_KND)


def draw_kept(x_BND: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Which samples are computed, and the weight of each: 1 / (1 - rate), for the last one sometimes 0."""
    batch = x_BND.shape[0]
    expected = batch * (1 - rate)
    computed = kept_samples(batch, rate)
    kept_K = torch.randperm(batch, device=x_BND.device)[:computed]
    weight_K11 = x_BND.new_full((computed, 1, 1), 1 / (1 - rate))
    weight_K11[-1] *= torch.rand((), device=x_BND.device) < expected - (computed - 1)
    return kept_K, weight_K11


def kept_samples(batch: int, rate: float) -> int:
    """How many samples of a batch `skip` computes."""
    # The small number keeps 10 * (1 - 0.1), a little over 9 in floating point, from becoming 10.
    return max(1, math.ceil(batch * (1 - rate) - 1e-6))


def drop_path_rates(rate: float, depth: int, schedule: Literal["linear", "uniform"]) -> list[float]:
    """The rate of each block: rising from 0 to `rate`, or the same everywhere."""
    if schedule == "uniform":
        return [rate] * depth
    return [rate * i / max(1, depth - 1) for i in range(depth)]
