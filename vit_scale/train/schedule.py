"""Learning rate and EMA weight as functions of the step. No scheduler object is prepared, stepped or restored."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
