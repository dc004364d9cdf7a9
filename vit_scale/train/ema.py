"""The moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vit_scale.train.schedule import ema_weight


class Ema:
    """A bias-corrected average of a model's parameters in fp32; buffers are used as they are.

    The weight of each update is a function of the step (`schedule.ema_weight`), so a resumed run needs the averaged
    tensors and nothing else.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool) -> None:
        self.decay, self.warmup = decay, warmup
        self._params = dict(model.named_parameters())
        self.shadow = {name: p.detach().float().clone() for name, p in self._params.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after update `step`."""
        weight = ema_weight(step, self.decay, self.warmup)
        params = [p.detach().float() for p in self._params.values()]
        torch._foreach_lerp_(list(self.shadow.values()), params, weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context the model has the averaged weights; storage is swapped, nothing is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, p in self._params.items():
            p.data, self.shadow[name] = self.shadow[name], p.data

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Continue from the averaged tensors of a checkpoint."""
        for name, shadow in self.shadow.items():
            shadow.copy_(tensors[name])
