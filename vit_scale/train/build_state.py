"""Build the model and the training state with a strategy: construct, load weights, place, wrap."""

from __future__ import annotations

import torch
from torch import nn

from vit_scale.config import Config
from vit_scale.schedule import Plan
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.strategy import Strategy
from vit_scale.train.optim.optimizer import build_optimizer
from vit_scale.train.state import TrainState


def build_state(model: nn.Module, strategy: Strategy, config: Config, plan: Plan) -> TrainState:
    """Place `model`, wrap it with its optimizer, and start its EMA."""
    strategy.place(model)
    optimizer = build_optimizer(model, config.optim)
    if config.parallel.compile:
        model.compile_blocks()  # type: ignore[operator]
    model.set_activation_checkpointing(config.parallel.activation_checkpointing)  # type: ignore[operator]
    engine = strategy.wrap(model, optimizer, plan)
    ema = Ema(engine.shards, config.ema.decay, config.ema.warmup) if config.ema.decay else None
    skipped, consecutive = (torch.zeros((), device=engine.device) for _ in range(2))
    return TrainState(engine, ema, skipped_steps=skipped, consecutive_skipped_steps=consecutive)
