"""Steps, batch sizes and rates as functions of the options and the step.

No scheduler object is prepared, stepped or restored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vit_scale.config import Config, Length
from vit_scale.errors import UserError
from vit_scale.format import format_steps

# Without a measurement: large enough to keep a device busy, small enough to fit with every variant up to Base.
DEFAULT_MICRO_BATCH = {"cpu": 64, "cuda": 128}

# What `auto` aims at.
LOGGED_LINES, EVALUATIONS, SAVE_SECONDS = 100, 10, 600.0


@dataclass(frozen=True)
class Plan:
    """Decisions made before the first step. Recorded with the run and reused on resume."""

    train_images: int
    """0: a stream of unknown length."""
    steps: int
    warmup_steps: int
    global_batch: int
    micro_batch: int
    accumulation: int
    processes: int
    eval_batch: int
    unmixed_steps: int = 0
    """Steps at the end without MixUp and CutMix."""
    log_every: int = 1
    eval_every: int = 1
    probe_every: int | None = None
    attention_every: int | None = None
    save_every: int = 1
    save_seconds: float = 0.0
    """Maximum time between checkpoints; 0: no limit."""

    def is_last(self, step: int) -> bool:
        """Return whether `step` is the last one."""
        return step == self.steps

    def is_logged(self, step: int) -> bool:
        """Return whether the metrics of `step` are read from the device."""
        return self.is_last(step) or step % self.log_every == 0 or self.is_evaluated(step)

    def is_evaluated(self, step: int) -> bool:
        """Return whether the weights after `step` are evaluated."""
        return self.is_last(step) or step % self.eval_every == 0

    def is_probed(self, step: int) -> bool:
        """Return whether the features after `step` are classified by k-NN."""
        return self.probe_every is not None and (self.is_last(step) or step % self.probe_every == 0)

    def is_looked_at(self, step: int) -> bool:
        """Return whether the attention after `step` is measured."""
        return self.attention_every is not None and (self.is_last(step) or step % self.attention_every == 0)

    def is_measured(self, step: int) -> bool:
        """Return whether the weights after `step` are evaluated, their features classified or attention measured."""
        return self.is_evaluated(step) or self.is_probed(step) or self.is_looked_at(step)

    def is_saved(self, step: int) -> bool:
        """Return whether a checkpoint is written after `step`: always before `is_measured`."""
        return step % self.save_every == 0 or self.is_measured(step)

    def is_out_of_patience(self, patience: int | None, step: int, best_step: int) -> bool:
        """Return whether `patience` evaluations up to `step` have not improved on the one at `best_step`."""
        return patience is not None and step // self.eval_every - best_step // self.eval_every >= patience

    def epoch(self, step: int) -> float:
        """Return the number of epochs completed after `step` steps."""
        return step * self.global_batch / self.train_images if self.train_images else 0.0

    def with_micro_batch(self, micro_batch: int) -> Plan:
        """Return the same plan with another micro-batch size."""
        accumulation = self.global_batch // self.processes // micro_batch
        return replace(self, micro_batch=micro_batch, accumulation=accumulation)

    def format_batch_size(self) -> str:
        """Format as `128 (2 processes x 4 accumulation steps x 16 images)`."""
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        accumulation = f"{self.accumulation} accumulation step{'s' if self.accumulation > 1 else ''}"
        images = f"{self.micro_batch} image{'s' if self.micro_batch > 1 else ''}"
        return f"{self.global_batch:,} ({processes} x {accumulation} x {images})"


def make_plan(config: Config, *, train_images: int, processes: int, device: str, multiple: int = 1) -> Plan:
    """Derive the plan from the options; raises `UserError` if a batch size is not divisible.

    The micro-batch of `auto` is a multiple of `multiple`, if one divides the images per process.
    """
    global_batch = config.batch.global_
    if global_batch % processes:
        raise UserError(
            f"batch.global = {global_batch}: not divisible by {processes} processes; "
            f"nearest values: {global_batch // processes * processes} and {-(-global_batch // processes) * processes}"
        )
    local_batch = global_batch // processes
    micro = _micro_batch(config, local_batch, processes, device, multiple)
    steps = config.schedule.steps or max(1, round((config.schedule.epochs or 0) * train_images / global_batch))
    eval_every = auto_eval_every(steps) if config.run.eval_every == "auto" else config.run.eval_every
    return Plan(
        train_images=train_images,
        steps=steps,
        warmup_steps=_warmup_steps(config, train_images, steps),
        unmixed_steps=_unmixed_steps(config, train_images, steps),
        log_every=auto_log_every(steps) if config.run.log_every == "auto" else config.run.log_every,
        eval_every=eval_every,
        probe_every=config.run.probe_every,
        attention_every=config.track.attention_every,
        save_every=eval_every if config.run.save_every == "auto" else config.run.save_every,
        save_seconds=SAVE_SECONDS if config.run.save_every == "auto" else 0.0,
        global_batch=global_batch,
        micro_batch=micro,
        accumulation=local_batch // micro,
        processes=processes,
        eval_batch=max(micro, DEFAULT_MICRO_BATCH[device]) if config.batch.eval == "auto" else config.batch.eval,
    )


def _micro_batch(config: Config, local_batch: int, processes: int, device: str, multiple: int) -> int:
    micro = config.batch.micro
    if micro == "auto":
        largest = min(local_batch, DEFAULT_MICRO_BATCH[device])
        divisors = [size for size in range(largest, 0, -1) if local_batch % size == 0]
        return next((size for size in divisors if size % multiple == 0), divisors[0])
    if local_batch % micro:
        raise UserError(
            f"batch.micro = {micro}: does not divide {local_batch} images per process "
            f"(batch.global = {config.batch.global_}, {processes} processes); "
            f"nearest divisors: {nearest_divisors(local_batch, micro)}"
        )
    return micro


def auto_log_every(steps: int) -> int:
    """Return the number 1, 2 or 5 times a power of 10 with about LOGGED_LINES intervals in `steps`."""
    target = max(1.0, steps / LOGGED_LINES)
    powers = range(math.ceil(math.log10(target)) + 1)
    return min((unit * 10**power for power in powers for unit in (1, 2, 5)), key=lambda n: abs(math.log(n / target)))


def auto_eval_every(steps: int) -> int:
    """Return a multiple of the logging interval with at most EVALUATIONS intervals in `steps`."""
    return auto_log_every(steps) * math.ceil(steps / EVALUATIONS / auto_log_every(steps))


def _warmup_steps(config: Config, train_images: int, steps: int) -> int:
    option, warmup = _requested_warmup(config, train_images)
    scaled = None if warmup < steps else _scaled(config, option, warmup, train_images, steps)
    if scaled is None and warmup > steps:
        raise UserError(f"schedule: {warmup} warmup steps exceed the {steps} steps of the run")
    return warmup if scaled is None else scaled


def _requested_warmup(config: Config, train_images: int) -> tuple[str, int]:
    """Return the option that sets the warmup, and its value in steps."""
    schedule = config.schedule
    if schedule.warmup_steps is not None:
        return "schedule.warmup_steps", schedule.warmup_steps
    return "schedule.warmup_epochs", math.ceil((schedule.warmup_epochs or 0) * train_images / config.batch.global_)


def _unmixed_steps(config: Config, train_images: int, steps: int) -> int:
    unmixed = _requested_unmixed(config, train_images)
    scaled = None if unmixed < steps else _scaled(config, "augment.no_mix_epochs", unmixed, train_images, steps)
    return unmixed if scaled is None else scaled


def _requested_unmixed(config: Config, train_images: int) -> int:
    return round(config.augment.no_mix_epochs * train_images / config.batch.global_)


def _scaled(config: Config, option: str, value: int, train_images: int, steps: int) -> int | None:
    """Return `value` steps of `option` as the same fraction of `steps` as of the length it was written for.

    None if the layer that sets the length also sets the option, or if that fraction is unknown.
    """
    written_for = config.written_for.get(option)
    before = _in_steps(written_for, train_images, config.batch.global_) if written_for else 0.0
    return math.ceil(min(1.0, value / before) * steps - 1e-9) if before else None


def _in_steps(length: Length, train_images: int, global_batch: int) -> float:
    return length.steps or (length.epochs or 0.0) * train_images / global_batch


def scaling_note(config: Config, plan: Plan) -> str | None:
    """Return one line about options of lower layers that were scaled to the length of `plan`, if any."""
    option, warmup = _requested_warmup(config, plan.train_images)
    unmixed = _requested_unmixed(config, plan.train_images)
    changes = {option: (warmup, plan.warmup_steps), "augment.no_mix_epochs": (unmixed, plan.unmixed_steps)}
    texts = [f"{name} scaled from {old:,} steps to {new:,}" for name, (old, new) in changes.items() if old != new]
    return f"Schedule shortened to {format_steps(plan.steps)}: {', '.join(texts)}." if texts else None


def with_decisions(config: Config, plan: Plan) -> Config:
    """Return the options with what `plan` decided: scaled options, and numbers instead of `auto` intervals."""
    schedule, augment, run = config.schedule, config.augment, config.run
    if _requested_warmup(config, plan.train_images)[1] != plan.warmup_steps:
        schedule = replace(schedule, warmup_steps=plan.warmup_steps, warmup_epochs=None)
    if _requested_unmixed(config, plan.train_images) != plan.unmixed_steps:
        augment = replace(augment, no_mix_epochs=plan.epoch(plan.unmixed_steps))
    run = replace(run, log_every=plan.log_every, eval_every=plan.eval_every, save_every=plan.save_every)
    return replace(config, schedule=schedule, augment=augment, run=run, written_for={})


def learning_rate(config: Config, plan: Plan) -> LearningRate:
    """Return the learning rate of the run as a function of the step."""
    return LearningRate(
        peak=config.optim.lr,
        final=config.schedule.final_lr,
        steps=plan.steps,
        warmup_steps=plan.warmup_steps,
        shape=config.schedule.shape,
    )


def nearest_divisors(total: int, requested: int) -> str:
    """Format the divisors of `total` next below and above `requested`: `4 and 8`."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = [d for d in divisors if d <= requested][-1:]
    above = [d for d in divisors if d > requested][:1]
    return " and ".join(str(d) for d in below + above)


@dataclass(frozen=True)
class LearningRate:
    """Linear warmup to `peak`, then decay of the given `shape` to `final`."""

    peak: float
    final: float
    steps: int
    warmup_steps: int
    shape: str = "cosine"

    def at(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        decay = {
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "linear": 1.0 - progress,
            "constant": 1.0,
        }[self.shape]
        return self.final + (self.peak - self.final) * decay


def ema_weight(step: int, decay: float, warmup: bool) -> float:
    """Return the bias-corrected coefficient with which the EMA moves towards the weights after `step`.

    A plain EMA starts from zero and is divided by one minus the product of all decays so far. Folding that division
    into the coefficient makes the first one 1, so the random initialization never enters the EMA. With `warmup`, the
    decay of step t is min(decay, (1 + t) / (10 + t)).
    """
    if not warmup:
        return (1.0 - decay) / (1.0 - decay ** (step + 1))
    decay_now = min(decay, (1 + step) / (10 + step))
    return (1.0 - decay_now) / (1.0 - _product_of_decays(step, decay))


def _product_of_decays(step: int, decay: float) -> float:
    """Return the product of min(decay, (1 + t) / (10 + t)) over t = 0 .. step, in closed form."""
    # (1 + t) / (10 + t) >= decay for every t from here on
    crossover = max(0, math.ceil((10 * decay - 1) / (1 - decay)))
    rising = min(step + 1, crossover)  # number of factors before the crossover
    # prod_{t < n} (1 + t) / (10 + t) = n! 9! / (n + 9)!
    log_rising = math.lgamma(rising + 1) + math.lgamma(10) - math.lgamma(rising + 10)
    flat = step + 1 - rising
    return math.exp(log_rising) * (decay**flat if flat else 1.0)
