"""What a trial measures, and what follows for the whole run."""

from __future__ import annotations

import dataclasses
import math
import resource
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vit_scale import gpu
from vit_scale.config import Config
from vit_scale.plan.data_size import DataSize
from vit_scale.schedule import Plan, make_plan
from vit_scale.train.micro_batch import trial_on_engine
from vit_scale.train.run import Run

ASSUMED_EVALUATIONS = 10
"""Evaluations of a run that chooses their interval itself."""


class Check(NamedTuple):
    """One part of the trial."""

    part: str
    passed: bool
    text: str


@dataclass
class Measurements:
    """Filled in part by part."""

    config: Config
    """The recipe's options."""
    short: Config
    """The options of the trial."""
    plan: Plan
    """Of the whole run; 0 steps: unknown."""
    size: DataSize
    """Of the recipe's data."""
    notes: dict[str, str]
    """What is not as in the recipe."""
    part: str = "build"
    """The part in progress."""
    checks: list[Check] = field(default_factory=list)
    steps: int = 0
    is_slow: bool = False
    """Fewer steps than intended were taken."""
    trial_plan: Plan | None = None
    step_seconds: float = 0.0
    """One step of the trial, including `wait_seconds`."""
    wait_seconds: float = 0.0
    """Time of a step spent waiting for data."""
    pass_seconds: float | None = None
    """Forward and backward pass of one micro-batch; measured only if the recipe has more of them per step."""
    eval_batch_seconds: float = 0.0
    copy_seconds: float = 0.0
    """How long a checkpoint interrupts training."""
    memory: int = 0
    """Bytes per process: the peak on a GPU, or of the process."""

    @property
    def failed(self) -> bool:
        """Return whether a check failed."""
        return not all(check.passed for check in self.checks)

    def passed(self, text: str) -> None:
        """Record that the current part worked."""
        self.checks.append(Check(self.part, True, text))

    def fail(self, text: str) -> None:
        """Record that the current part failed."""
        self.checks.append(Check(self.part, False, text))

    def read_steps(self, run: Run, step_seconds: float, wait_seconds: float) -> None:
        """Store the mean duration of a step; all ranks must call it."""
        self.trial_plan, self.step_seconds, self.wait_seconds = run.plan, step_seconds, wait_seconds
        if self.accumulation > run.plan.accumulation:
            speed = trial_on_engine(run.state.engine, run.task, repeats=1)(run.plan.micro_batch)
            self.pass_seconds = None if speed is None else run.plan.micro_batch / speed

    def read_memory(self, device: torch.device) -> None:
        """Store the peak memory: on a GPU since the first step, otherwise of the process."""
        if gpu.is_gpu(device):
            self.memory = gpu.peak_memory(device)
        else:
            self.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    # ------------------------------------------------------------------------------------------------- the whole run

    @property
    def accumulation(self) -> int:
        """Accumulation steps of the whole run with the trial's micro-batch."""
        assert self.trial_plan is not None
        return max(1, self.plan.global_batch // self.plan.processes // self.trial_plan.micro_batch)

    @property
    def real_step_seconds(self) -> float:
        """Duration of a step of the whole run: more forward and backward passes, but still one optimizer step."""
        assert self.trial_plan is not None
        if self.pass_seconds is None:
            return self.step_seconds * self.plan.global_batch / self.trial_plan.global_batch
        passes = self.trial_plan.accumulation
        each = self.pass_seconds + self.wait_seconds / passes
        return max(0.0, self.step_seconds - passes * each) + self.accumulation * each

    @property
    def train_seconds(self) -> float:
        """Training steps of the whole run."""
        return self.plan.steps * self.real_step_seconds

    @property
    def eval_seconds(self) -> float:
        """All evaluations of the whole run; with an EMA each has two passes."""
        assert self.trial_plan is not None
        batches = math.ceil(self.eval_images / (self.trial_plan.eval_batch * self.plan.processes))
        passes = 2 if self.config.ema.decay else 1
        return self.evaluations * passes * batches * self.eval_batch_seconds

    @property
    def eval_images(self) -> int:
        """Images per evaluation of the whole run; 0: unknown."""
        return min(self.size.val_images, self.config.run.eval_images or self.size.val_images)

    @property
    def evaluations(self) -> int:
        """Evaluations of the whole run."""
        return times(self.config.run.eval_every, self.plan.steps)

    @property
    def save_seconds(self) -> float:
        """Interruptions by all checkpoints of the whole run."""
        return times(self.config.run.save_every, self.plan.steps) * self.copy_seconds


def times(every: object, steps: int) -> int:
    """Return how often something happens `every` so many steps and at the end."""
    return math.ceil(steps / every) if isinstance(every, int) else min(steps, ASSUMED_EVALUATIONS)


def real_plan(config: Config, size: DataSize, world: int, device: str) -> Plan:
    """Return the plan of the whole run; 0 steps if the number of images is unknown but needed."""
    plan = make_plan(config, train_images=size.images, processes=world, device=device)
    known = size.images or config.schedule.steps is not None
    return plan if known else dataclasses.replace(plan, steps=0)
