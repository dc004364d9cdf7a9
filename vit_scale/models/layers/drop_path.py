"""Stochastic depth (Huang et al. 2016, arXiv:1603.09382): drop a residual branch for some samples.

Shapes: B batch, K samples that are computed, N tokens, D token width.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn


class Draw(NamedTuple):
    """The samples that keep a branch, drawn before a compiled block runs."""

    kept_K: Tensor | None
    """Indices of the samples to compute; None: all."""
    weights_K11: Tensor
    """What their branch is multiplied by: 0 or 1 / (1 - rate)."""


class DropPath(nn.Module):
    """`x + branch(x)`; in training the branch is dropped for a fraction `rate` of the samples.

    Both modes keep the branch of a sample with probability 1 - rate and then divide it by 1 - rate, so its expected
    value and variance are the same. `mask` computes every branch and zeroes some. `skip` gathers the samples that are
    kept and computes only those.

    B (1 - rate) is rarely an integer; the number of kept samples is one of the two integers around it, so that its
    mean is exact. On a CPU only those are computed. On a GPU always K = ceil(B (1 - rate)) are, and the last of them
    sometimes has weight 0: shapes and memory never change from step to step, so nothing recompiles. K >= 1 everywhere,
    so that every rank runs every module.
    """

    def __init__(self, rate: float, mode: Literal["skip", "mask"] = "skip") -> None:
        super().__init__()
        self.rate = rate
        self.mode = mode

    def forward(
        self, x_BND: Tensor, branch: Callable[..., Tensor], *per_sample: Tensor | None, draw: Draw | None = None
    ) -> Tensor:
        """Add the branch to x; `per_sample`: further arguments of the branch, indexed by sample like x."""
        if draw is not None:
            return self.add_drawn(draw, x_BND, branch, *per_sample)
        if not self.training or self.rate == 0:
            return x_BND + branch(x_BND, *per_sample)
        if self.mode == "mask":
            return x_BND + branch(x_BND, *per_sample) * self.draw_mask(x_BND)
        kept_K, counts_K11 = self.draw_kept(x_BND)
        y_KND = branch(*(None if t is None else t.index_select(0, kept_K) for t in (x_BND, *per_sample)))
        if counts_K11 is not None:
            y_KND = y_KND * counts_K11
        return x_BND.index_add(0, kept_K, y_KND.to(x_BND.dtype), alpha=1 / (1 - self.rate))

    def draw(self, x_BND: Tensor) -> Draw | None:
        """Draw what `forward` otherwise draws itself; None if nothing is dropped.

        A compiler takes numbers of a module for constants. With a draw, the number of kept samples is the size of a
        tensor and the rate is one of its elements, so one graph serves blocks of any rate.
        """
        if not self.training or self.rate == 0:
            return None
        if self.mode == "mask":
            return Draw(None, self.draw_mask(x_BND))
        kept_K, counts_K11 = self.draw_kept(x_BND, fixed_size=True)
        assert counts_K11 is not None
        draw = Draw(kept_K, counts_K11 / (1 - self.rate))
        for tensor in draw:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return draw

    def add_drawn(self, draw: Draw, x_BND: Tensor, branch: Callable[..., Tensor], *per_sample: Tensor | None) -> Tensor:
        """Add the branch to x for the samples of `draw`; of x keep as many leading tokens as the branch returns."""
        inputs, kept_K = (x_BND, *per_sample), draw.kept_K
        if kept_K is not None:
            inputs = tuple(None if t is None else t.index_select(0, kept_K) for t in inputs)  # type: ignore[assignment]
        y_KND = branch(*inputs)
        x_BND, y_KND = x_BND[:, : y_KND.shape[1]], (y_KND * draw.weights_K11).to(x_BND.dtype)
        return x_BND + y_KND if kept_K is None else x_BND.index_add(0, kept_K, y_KND)

    def extra_repr(self) -> str:
        """Describe the layer in print(model)."""
        return f"rate={self.rate:.3f}, mode={self.mode}"

    def draw_mask(self, x_BND: Tensor) -> Tensor:
        """Draw 0 or 1 / (1 - rate) per sample, [B, 1, 1]."""
        keep = 1 - self.rate
        return x_BND.new_empty(x_BND.shape[0], 1, 1).bernoulli_(keep) / keep

    def draw_kept(self, x_BND: Tensor, *, fixed_size: bool = False) -> tuple[Tensor, Tensor | None]:
        """Draw the samples to compute, [K], and their weights 1 or 0, [K, 1, 1]; None if all weights are 1.

        `fixed_size`: K is the same for every draw, on a CPU too.
        """
        batch, device = x_BND.shape[0], x_BND.device
        computed = kept_samples(batch, self.rate)
        last_counts = torch.rand((), device=device) < batch * (1 - self.rate) - (computed - 1)
        # The fake tensors of a compiler or a counter have no value to read.
        is_readable = device.type == "cpu" and type(x_BND) is Tensor and not torch.compiler.is_compiling()
        may_read = is_readable and not fixed_size
        fewer = may_read and (computed > 1 or bool(last_counts))
        if fewer:
            computed -= not last_counts
        kept_K = torch.randperm(batch, device=device)[:computed]
        if fewer:
            return kept_K, None
        counts_K11 = x_BND.new_ones(computed, 1, 1)
        counts_K11[-1] *= last_counts
        return kept_K, counts_K11


def kept_samples(batch: int, rate: float) -> int:
    """Return how many samples of a batch `skip` computes: at most on a CPU, always on a GPU."""
    # The small number keeps 10 * (1 - 0.1), slightly over 9 in floating point, from becoming 10.
    return max(1, math.ceil(batch * (1 - rate) - 1e-6))


def drop_path_rates(rate: float, depth: int, schedule: Literal["linear", "uniform"]) -> list[float]:
    """Return the rate of each block: rising from 0 to `rate`, or `rate` in every block."""
    if schedule == "uniform":
        return [rate] * depth
    return [rate * i / max(1, depth - 1) for i in range(depth)]
