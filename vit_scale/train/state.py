"""The one object that a training run changes as it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vit_scale.models.interface import ImageModel
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.loss_scale import LossScale
from vit_scale.strategies.shards import Shards


@dataclass
class TrainState:
    """What a checkpoint holds is all that the next step depends on.

    In a checkpoint: `step`, the weights and buffers, the optimiser's state and the EMA by parameter name,
    `best`, `best_step`, `bad_steps`, and in fp16 the loss scale.
    Not in a checkpoint, because they are functions of (seed, step): learning rate, EMA decay, sample order,
    augmentation, mixing, and the random numbers of dropout and stochastic depth.
    """

    model: ImageModel
    """The bare module, with timm's parameter names."""
    wrapped: Any
    """What is called in the forward pass: the bare module, DDP around it, or DeepSpeed's engine."""
    optimizer: torch.optim.Optimizer
    shards: Shards
    """The tensors of all of these, as pieces."""
    ema: Ema | None = None
    input_dtype: torch.dtype = torch.float32
    """What images must be: half precision where DeepSpeed keeps the weights of the forward pass in it."""
    step: int = 0
    """Updates done; also the index of the next one."""
    best: float | None = None
    """Best value so far of the task's first metric."""
    best_step: int = 0
    bad_steps: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """Updates skipped because the gradient was not finite, counted on the device."""
    bad_in_a_row: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    loss_scale: LossScale | None = None
    """Only in fp16."""
