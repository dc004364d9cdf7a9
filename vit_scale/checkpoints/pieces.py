"""The unit in which training state is written and read: contiguous pieces of flattened tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Scalars = dict[str, dict[str, Any]]
"""Optimizer state that has no element per parameter element, such as step counters, by parameter name."""


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start + tensor.numel()` of a flattened tensor. A view: writing to it changes the run."""

    tensor: torch.Tensor
    start: int


Pieces = dict[str, Piece]
Whole = Iterator[tuple[str, torch.Tensor | None]]
"""Full tensors, one at a time: on rank 0 the tensor, on other ranks None. All ranks must exhaust it."""


class Snapshot(Protocol):
    """Training state as a checkpoint sees it. Every rank calls each method, in the same order."""

    step: int
    best_step: int

    def numbers(self) -> dict[str, Any]:
        """Return the state that is not tensors, for meta.json."""

    def owned_pieces(self) -> Pieces:
        """Return this rank's pieces as `optimizer/<key>/<parameter>` and `ema/<parameter>`."""

    def scalars(self) -> Scalars:
        """Return the optimizer state that `owned_pieces` does not cover."""

    def whole(self) -> Whole:
        """Yield every weight and buffer, in fp32, under timm's names."""

    def whole_ema(self) -> Whole:
        """Yield the EMA of every trained weight; nothing without an EMA."""
