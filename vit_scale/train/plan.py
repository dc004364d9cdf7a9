"""From options to numbers: how many steps, how the global batch is cut, and in what precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vit_scale.config import Config
from vit_scale.errors import UserError
from vit_scale.recipe import nearest_divisors
from vit_scale.train.schedule import LearningRate

# Without a measurement: large enough to keep a device busy, small enough to fit with every variant up to Base.
DEFAULT_MICRO_BATCH = {"cpu": 64, "cuda": 128}


@dataclass(frozen=True)
class Plan:
    """What was decided before the first step. It is recorded with the run and kept when resuming."""

    train_images: int
    """0: a stream that does not tell."""
    steps: int
    warmup_steps: int
    global_batch: int
    micro_batch: int
    accumulation: int
    processes: int
    eval_batch: int

    def epoch(self, step: int) -> float:
        """Passes over the training images after `step` updates."""
        return step * self.global_batch / self.train_images if self.train_images else 0.0

    def with_micro_batch(self, micro_batch: int) -> Plan:
        """The same plan, cut into other micro batches."""
        accumulation = self.global_batch // self.processes // micro_batch
        return replace(self, micro_batch=micro_batch, accumulation=accumulation)

    def batch_in_words(self) -> str:
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        passes = f"{self.accumulation} forward pass{'es' if self.accumulation > 1 else ''}"
        return f"{self.global_batch:,} images an update = {processes} x {passes} x {self.micro_batch} images"


def make_plan(config: Config, *, train_images: int, processes: int, device: str) -> Plan:
    """Derive the plan; raises `UserError` where the batch does not divide."""
    global_batch = config.batch.global_
    if global_batch % processes:
        raise UserError(
            f"batch.global = {global_batch}: does not divide over {processes} processes; "
            f"nearest that do: {global_batch // processes * processes} and {-(-global_batch // processes) * processes}"
        )
    local_batch = global_batch // processes
    micro = _micro_batch(config, local_batch, processes, device)
    steps = config.schedule.steps or max(1, round((config.schedule.epochs or 0) * train_images / global_batch))
    return Plan(
        train_images=train_images,
        steps=steps,
        warmup_steps=_warmup_steps(config, train_images, steps),
        global_batch=global_batch,
        micro_batch=micro,
        accumulation=local_batch // micro,
        processes=processes,
        eval_batch=max(micro, DEFAULT_MICRO_BATCH[device]) if config.batch.eval == "auto" else config.batch.eval,
    )


def _micro_batch(config: Config, local_batch: int, processes: int, device: str) -> int:
    micro = config.batch.micro
    if micro == "auto":
        fitting = range(min(local_batch, DEFAULT_MICRO_BATCH[device]), 0, -1)
        return next(size for size in fitting if local_batch % size == 0)
    if local_batch % micro:
        raise UserError(
            f"batch.micro = {micro}: does not divide the {local_batch} images of one process "
            f"(batch.global = {config.batch.global_} over {processes}); "
            f"nearest that do: {nearest_divisors(local_batch, micro)}"
        )
    return micro


def _warmup_steps(config: Config, train_images: int, steps: int) -> int:
    schedule = config.schedule
    if schedule.warmup_steps is not None:
        warmup = schedule.warmup_steps
    else:
        warmup = math.ceil((schedule.warmup_epochs or 0) * train_images / config.batch.global_)
    if warmup > steps:
        raise UserError(f"schedule: a warm-up of {warmup} steps is longer than the run of {steps} steps")
    return warmup


def learning_rate(config: Config, plan: Plan) -> LearningRate:
    """The learning rate of this run as a function of the step."""
    return LearningRate(
        peak=config.optim.lr,
        final=config.schedule.final_lr,
        steps=plan.steps,
        warmup_steps=plan.warmup_steps,
        shape=config.schedule.shape,
    )
