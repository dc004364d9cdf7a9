"""Measure how fast a recipe trains on this system: a few real steps on its own images, without a run directory."""

from __future__ import annotations

import dataclasses
import time

import torch

from vit_scale import gpu
from vit_scale.config import Config
from vit_scale.cost.training import training_cost
from vit_scale.data.data import Data
from vit_scale.kernels.cpu import limit_threads
from vit_scale.kernels.malloc import retain_freed_memory
from vit_scale.models.interface import backbone_of
from vit_scale.schedule import make_plan
from vit_scale.strategies.precision import resolve_precision
from vit_scale.strategies.processes import restored_process
from vit_scale.strategies.strategy import make_strategy
from vit_scale.tasks import task_class
from vit_scale.train.build_state import build_model, build_state
from vit_scale.train.loaders import make_loaders
from vit_scale.train.micro_batch import resolve_micro_batch
from vit_scale.train.update import update

SECONDS = 4.0
MAX_STEPS = 100


def images_per_second(config: Config, data: Data, seconds: float = SECONDS) -> float:
    """Return the training speed of one process with images loaded as in a run; takes `seconds` and the first steps."""
    # Neither the initial weights nor the length of the run change the speed.
    model = dataclasses.replace(config.model, weights=None, init="trunc_normal")
    schedule = dataclasses.replace(config.schedule, steps=10**6, epochs=None, warmup_steps=0, warmup_epochs=None)
    config = dataclasses.replace(config, model=model, schedule=schedule)
    retain_freed_memory(include_large=not torch.cuda.is_available())
    with restored_process():
        return _measure(config, data, seconds)


def _measure(config: Config, data: Data, seconds: float) -> float:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = resolve_precision(config.parallel.precision, device)
    plan = make_plan(config, train_images=len(data.train), processes=1, device=device.type)
    task = task_class(config)(config, data.info, plan)
    strategy = make_strategy(config, plan, "single", precision)
    built, _ = build_model(task, strategy, config)
    state = build_state(built, strategy, config, plan)
    task.to(strategy.device, state.engine.input_dtype)
    plan, _ = resolve_micro_batch(config, plan, task, state.engine, precision)
    limit_threads(training_cost(task.cost_parts(built), config, batch=None).total * plan.micro_batch)
    loaders = make_loaders(config, plan, task, data, backbone_of(built), step=0, rank=0)
    try:
        batches = iter(loaders.train)
        started, timed = 0.0, 0
        for step in range(MAX_STEPS):
            if step == 2:  # The first steps allocate memory and fill the loader.
                started = time.perf_counter()
            micro_batches = [next(batches) for _ in range(plan.accumulation)]
            update(task, state, micro_batches, lr=config.optim.lr, seed=0, clip_norm=config.optim.clip_norm)
            state.step += 1
            gpu.synchronize(device)
            timed = step - 1
            if step >= 2 and time.perf_counter() - started > seconds:
                break
        return timed * plan.global_batch / (time.perf_counter() - started)
    finally:
        loaders.close()
