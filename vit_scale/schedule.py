"""Steps, batch sizes and rates as functions of the options and the step.

No scheduler object is prepared, stepped or restored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vit_scale.config import Config
from vit_scale.errors import UserError

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


def nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` next below and above `wanted`, in words."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = [d for d in divisors if d <= wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " and ".join(str(d) for d in below + above)


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then `shape` down to `final`; `at(step)` is the rate of that update, from 0."""

    peak: float
    final: float
    steps: int
    warmup_steps: int
    shape: str = "cosine"

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        falling = {
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "linear": 1.0 - progress,
            "constant": 1.0,
        }[self.shape]
        return self.final + (self.peak - self.final) * falling


def ema_weight(step: int, decay: float, warmup: bool) -> float:
    """How far the average moves towards the weights after update `step`, bias-corrected.

    The plain average starts from zero and is divided by one minus the product of all decays so far; folding that
    division into the update makes its first weight 1, so the random start never enters the average. With `warmup`
    the decay of update t is min(decay, (1 + t) / (10 + t)).
    """
    if not warmup:
        return (1.0 - decay) / (1.0 - decay ** (step + 1))
    decay_now = min(decay, (1 + step) / (10 + step))
    return (1.0 - decay_now) / (1.0 - _product_of_decays(step, decay))


def _product_of_decays(step: int, decay: float) -> float:
    """min(decay, (1 + t) / (10 + t)) multiplied over t = 0 .. step, in closed form."""
    # (1 + t) / (10 + t) >= decay from this t on
    crossover = max(0, math.ceil((10 * decay - 1) / (1 - decay)))
    rising = min(step + 1, crossover)  # number of factors before the crossover
    # prod_{t < n} (1 + t) / (10 + t) = n! 9! / (n + 9)!
    log_rising = math.lgamma(rising + 1) + math.lgamma(10) - math.lgamma(rising + 10)
    flat = step + 1 - rising
    return math.exp(log_rising) * (decay**flat if flat else 1.0)
