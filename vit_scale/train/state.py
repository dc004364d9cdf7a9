"""The one object that a training run changes from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vit_scale.checkpoints.pieces import Pieces, Scalars, Whole
from vit_scale.checkpoints.reader import Checkpoint
from vit_scale.errors import UserError
from vit_scale.models.interface import full_shape
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.strategy import Engine


@dataclass
class TrainState:
    """Everything the next step depends on; implements `checkpoints.pieces.Snapshot`.

    In a checkpoint: `step`, weights and buffers, optimizer state and EMA by parameter name, `best`, `best_step`,
    `evaluated`, `skipped_steps`, `consecutive_skipped_steps`, and in fp16 the loss scale.
    Not in a checkpoint, because they are functions of (seed, step): learning rate, EMA decay, sample order,
    augmentation, mixing, and the random numbers of dropout and stochastic depth.
    """

    engine: Engine
    ema: Ema | None = None
    step: int = 0
    """Steps taken; also the index of the next one."""
    best: float | None = None
    """Best value of the task's first metric; None before the first evaluation."""
    best_step: int = 0
    evaluated: bool = True
    """Whether the evaluation after `step`, if one is due, is done."""
    skipped_steps: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """Steps skipped because the gradient was non-finite, counted on the device."""
    consecutive_skipped_steps: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def model(self) -> Any:
        """The bare module, with timm's parameter names."""
        return self.engine.model

    def count_skipped(self, norm: torch.Tensor) -> None:
        """Count a step whose gradient norm was `norm` as skipped if it is non-finite; no host synchronization."""
        skipped = (~norm.isfinite()).float().to(self.skipped_steps.device)
        self.skipped_steps += skipped
        self.consecutive_skipped_steps = (self.consecutive_skipped_steps + 1) * skipped

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every large tensor that this rank holds: weights, gradients, optimizer state and EMA."""
        optimizer = self.engine.shards.torch_optimizer
        parameters = [*self.model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
        for parameter in parameters:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        if self.ema is not None:
            yield from (piece.tensor for piece in self.ema.pieces().values())

    # ---------------------------------------------------------------------------------------------------- Snapshot

    def numbers(self) -> dict[str, Any]:
        """Return the state that is not tensors."""
        return {
            "step": self.step,
            "best": self.best,
            "best_step": self.best_step,
            "evaluated": self.evaluated,
            "skipped_steps": int(self.skipped_steps.item()),
            "consecutive_skipped_steps": int(self.consecutive_skipped_steps.item()),
            "loss_scale": self.engine.loss_scale.numbers() if self.engine.loss_scale else None,
        }

    def owned_pieces(self) -> Pieces:
        """Return this rank's pieces of optimizer state and EMA."""
        groups: dict[str, Pieces] = {
            f"optimizer/{key}": pieces for key, pieces in self.engine.shards.optimizer_tensors(owned=True).items()
        }
        if self.ema is not None:
            groups["ema"] = self.ema.pieces()
        return {f"{group}/{name}": piece for group, pieces in groups.items() for name, piece in pieces.items()}

    def scalars(self) -> Scalars:
        """Return the optimizer state that `owned_pieces` does not cover."""
        return self.engine.shards.optimizer_scalars()

    def whole(self) -> Whole:
        """Yield every weight and buffer on rank 0, one at a time."""
        return self.engine.shards.whole()

    def whole_ema(self) -> Whole:
        """Yield the EMA of every trained weight on rank 0, one at a time; nothing without an EMA."""
        return iter(()) if self.ema is None else self.engine.shards.whole(self.ema.pieces())

    # --------------------------------------------------------------------------------------------------- restoring

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load `checkpoint`, written with any strategy on any number of ranks; all ranks must call it."""
        _check_shapes(self.model, checkpoint)
        self._restore_untrained(checkpoint)
        shards = self.engine.shards
        for name, piece in shards.weights(owned=False).items():
            checkpoint.fill_weight(name, piece)
        shards.make_optimizer_state(checkpoint.optimizer_keys, checkpoint.scalars)
        for key, pieces in shards.optimizer_tensors(owned=False).items():
            for name, piece in pieces.items():
                checkpoint.fill(f"optimizer/{key}/{name}", piece)
        for name, piece in self.ema.pieces().items() if self.ema is not None else ():
            if not checkpoint.fill(f"ema/{name}", piece):  # the run had no EMA until now
                checkpoint.fill_weight(name, piece)
        shards.publish()
        self._restore_numbers(checkpoint.meta)

    def _restore_untrained(self, checkpoint: Checkpoint) -> None:
        """Load buffers and frozen parameters."""
        parameters = dict(self.model.named_parameters())
        buffers = {name: tensor for name, tensor in self.model.state_dict().items() if name not in parameters}
        for name in checkpoint.names & buffers.keys():
            buffers[name].copy_(checkpoint.weight(name))
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                with torch.no_grad(), self.engine.editing(parameter) as values:
                    values.copy_(checkpoint.weight(name))

    def _restore_numbers(self, meta: dict[str, Any]) -> None:
        self.step, self.best, self.best_step = meta["step"], meta["best"], meta["best_step"]
        self.evaluated = meta["evaluated"]
        self.skipped_steps.fill_(meta["skipped_steps"])
        if self.engine.loss_scale is not None and meta.get("loss_scale"):
            self.engine.loss_scale.restore(meta["loss_scale"])


def _check_shapes(model: nn.Module, checkpoint: Checkpoint) -> None:
    for name, parameter in model.named_parameters():
        shape, found = list(full_shape(parameter)), checkpoint.shape(name)
        if found != shape:
            raise UserError(
                f"{checkpoint.path}: checkpoint of a different model: {name} has shape {found}, expected {shape}"
            )
