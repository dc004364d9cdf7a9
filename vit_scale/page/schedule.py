"""The learning rate of every step, from the options of a run: logged steps are often too far apart to show warmup."""

from __future__ import annotations

import math
from typing import Any

from vit_scale.page.runs import PageRun
from vit_scale.schedule import LearningRate

LEARNING_RATE = "train/lr"
MAX_POINTS = 200


def scheduled_rates(run: PageRun) -> dict[int, float]:
    """Return step -> learning rate up to the last logged step; empty unless it agrees with every logged value."""
    logged = run.metrics.curves.get(LEARNING_RATE, {})
    rate = _schedule(run)
    if rate is None or not logged:
        return {}
    if not all(
        value is not None and math.isclose(rate.at(step - 1), value, rel_tol=1e-5) for step, value in logged.items()
    ):
        return {}
    last, warmup = max(logged), rate.warmup_steps
    steps = {1 + (last - 1) * i // MAX_POINTS for i in range(MAX_POINTS + 1)} | {warmup, warmup + 1}
    return {step: rate.at(step - 1) for step in sorted(steps) if 1 <= step <= last}


def _schedule(run: PageRun) -> LearningRate | None:
    """Return the schedule that the options describe; None if they do not say, as those of other versions may not."""
    options = run.options
    per_epoch = _steps_per_epoch(run)
    steps = _count(options, "steps", per_epoch, round)
    warmup = _count(options, "warmup_steps", per_epoch, math.ceil, epochs="warmup_epochs")
    peak, final = options.get("optim.lr"), options.get("schedule.final_lr")
    shape = options.get("schedule.shape")
    if steps is None or not isinstance(peak, int | float) or not isinstance(final, int | float):
        return None
    return LearningRate(peak, final, steps, warmup or 0, shape) if shape in ("cosine", "linear", "constant") else None


def _count(
    options: dict[str, Any], name: str, per_epoch: float | None, whole: Any, epochs: str = "epochs"
) -> int | None:
    """Return an option in steps that may also be given in epochs."""
    steps, length = options.get(f"schedule.{name}"), options.get(f"schedule.{epochs}")
    if isinstance(steps, int):
        return steps
    return whole(length * per_epoch) if isinstance(length, int | float) and per_epoch else None


def _steps_per_epoch(run: PageRun) -> float | None:
    """Return the training images per batch size: both are whole, the logged epoch is not."""
    batch, epochs = run.options.get("batch.global"), run.metrics.epochs
    if not isinstance(batch, int) or not epochs or not epochs[max(epochs)]:
        return None
    step = max(epochs)
    return round(step * batch / epochs[step]) / batch
