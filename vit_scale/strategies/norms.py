"""Norms of the weights and of an update, the same number under every strategy.

Each process sums the squares of the pieces that it owns; the sum over processes is taken where metrics are read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vit_scale.strategies.shards import Shards


def own_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of squares of all elements, in double precision."""
    return torch.nn.utils.get_total_norm(tensors, foreach=True).to(device).double().square()


def weight_norm(shards: Shards, device: torch.device) -> float:
    """The norm of all trained weights; all processes must call it."""
    squares = own_squares(_owned(shards), device)
    if dist.is_initialized():
        dist.all_reduce(squares)
    return squares.sqrt().item()


class UpdateWatch:
    """Measures one update: weights are copied just before the optimiser changes them, when activations are gone."""

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self._shards, self._device = shards, device
        self._before: list[torch.Tensor] | None = None
        self._handle = _torch_optimizer(shards).register_step_pre_hook(self._copy)

    def _copy(self, *called_with: Any) -> None:
        # DeepSpeed steps once for each group of parameters.
        if self._before is None:
            self._before = [weights.clone() for weights in _owned(self._shards)]

    @torch.no_grad()
    def squares(self) -> torch.Tensor:
        """Squares of the weights and of their change, summed over what this process owns; stops watching."""
        self._handle.remove()
        weights, before = _owned(self._shards), self._before
        self._before = None
        change = torch.zeros((), dtype=torch.float64, device=self._device)
        if before:
            torch._foreach_sub_(before, weights)
            change = own_squares(before, self._device)
        return torch.stack([own_squares(weights, self._device), change])


def _owned(shards: Shards) -> list[torch.Tensor]:
    return [piece.tensor.detach() for piece in shards.weights(owned=True).values()]


def _torch_optimizer(shards: Shards) -> torch.optim.Optimizer:
    """What really steps: ZeRO has an optimiser of its own around it."""
    zero = getattr(shards, "zero", None)
    return shards.optimizer if zero is None else zero.optimizer  # type: ignore[union-attr]
