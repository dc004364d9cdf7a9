"""Norms of the weights and of their change in a step, the same number for every strategy.

Each rank sums the squares of the pieces that it owns; the sum over ranks is taken when metrics are read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vit_scale.strategies.shards import Shards


def own_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of all elements, in double precision."""
    return torch.nn.utils.get_total_norm(tensors, foreach=True).to(device).double().square()


def weight_norm(shards: Shards, device: torch.device) -> float:
    """Return the norm of all trained weights; all ranks must call it."""
    squares = own_squares(_owned(shards), device)
    if dist.is_initialized():
        dist.all_reduce(squares)
    return squares.sqrt().item()


class UpdateWatch:
    """Measure one update: copy the weights just before the optimizer changes them, when activations are freed."""

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self._shards, self._device = shards, device
        self._before: list[torch.Tensor] | None = None
        self._handle = shards.torch_optimizer.register_step_pre_hook(self._copy)

    def _copy(self, *called_with: Any) -> None:
        # DeepSpeed steps once per parameter group.
        if self._before is None:
            self._before = [weights.clone() for weights in _owned(self._shards)]

    @torch.no_grad()
    def squares(self) -> torch.Tensor:
        """Return the squares of the weights and of their change, summed over this rank's pieces; stop watching."""
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
