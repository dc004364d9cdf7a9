"""The exponential moving average (EMA) of the weights; each rank keeps 1/ranks of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vit_scale.checkpoints.pieces import Piece, Pieces
from vit_scale.schedule import ema_weight
from vit_scale.strategies.shards import Shards


class Ema:
    """A bias-corrected average in fp32 of the pieces that this rank owns.

    The weight of each step is a function of the step (`schedule.ema_weight`), so resuming needs the averaged tensors
    only. Frozen parameters and buffers are not averaged.
    """

    def __init__(self, shards: Shards, decay: float, warmup: bool) -> None:
        self.decay, self.warmup = decay, warmup
        self._shards = shards
        self._owned = shards.weights(owned=True)
        self._shadow = {name: piece.tensor.detach().float().clone() for name, piece in self._owned.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average in the weights after `step`."""
        weights = [piece.tensor.float() for piece in self._owned.values()]
        torch._foreach_lerp_(list(self._shadow.values()), weights, ema_weight(step, self.decay, self.warmup))

    def pieces(self) -> Pieces:
        """Return the averaged pieces; writing to them changes the EMA."""
        return {name: Piece(self._shadow[name], piece.start) for name, piece in self._owned.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the EMA weights within this context; all ranks must enter it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, piece in self._owned.items():
            raw = piece.tensor.clone()
            piece.tensor.copy_(self._shadow[name])
            self._shadow[name].copy_(raw)
        self._shards.publish()
