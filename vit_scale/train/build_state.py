"""Build the model and the training state with a strategy: construct, initialize, load weights, place, wrap."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from vit_scale.config import Config
from vit_scale.kernels import accept_hooks
from vit_scale.models.interface import backbone_of
from vit_scale.models.variants import TIMM_PREFIX
from vit_scale.models.weights.load import load_weights
from vit_scale.schedule import Plan
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.strategy import Strategy
from vit_scale.tasks.task import Task
from vit_scale.train.optim.optimizer import build_optimizer
from vit_scale.train.state import TrainState


def build_model(task: Task, strategy: Strategy, config: Config) -> tuple[nn.Module, str | None]:
    """Return the model of `task` with its initial weights, and a summary of the weights that were loaded.

    Under ZeRO-3 no rank ever holds the full model, and the initial weights are those of any other strategy. timm
    models initialize themselves while they are constructed, so each rank constructs them in full in host memory;
    `build_state` then moves them to the device tensor by tensor.
    """
    torch.manual_seed(config.run.seed)
    is_timm = config.model.name.startswith(TIMM_PREFIX)
    with nullcontext() if is_timm else strategy.constructing():
        model = task.build()
    task.init_weights(model, strategy.editing)
    if config.model.weights is None:
        return model, None
    return model, load_weights(backbone_of(model), config.model.weights, editing=strategy.editing).summary()


def build_state(model: nn.Module, strategy: Strategy, config: Config, plan: Plan) -> TrainState:
    """Place `model`, wrap it with its optimizer, and start its EMA."""
    strategy.place(model)
    optimizer = build_optimizer(model, config.optim)
    if config.parallel.compile:
        model.compile_blocks()  # type: ignore[operator]
    model.set_activation_checkpointing(config.parallel.activation_checkpointing)  # type: ignore[operator]
    with accept_hooks(model):
        engine = strategy.wrap(model, optimizer, plan)
    ema = Ema(engine.shards, config.ema.decay, config.ema.warmup) if config.ema.decay else None
    skipped, consecutive = (torch.zeros((), device=engine.device) for _ in range(2))
    return TrainState(engine, ema, skipped_steps=skipped, consecutive_skipped_steps=consecutive)
