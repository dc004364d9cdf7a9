"""A run: everything that the loop needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.config import Config
from vit_scale.cost.background_check import BackgroundCheck
from vit_scale.cost.training import StepCost
from vit_scale.data.batch import Batch
from vit_scale.record.record import SilentRecord
from vit_scale.schedule import Plan, learning_rate
from vit_scale.tasks.task import Task
from vit_scale.train.loaders import Loaders
from vit_scale.train.state import TrainState


@dataclass
class Run:
    """Only `state` changes from step to step."""

    config: Config
    plan: Plan
    folder: Path
    task: Task
    state: TrainState
    loaders: Loaders
    checkpoints: CheckpointFolder
    record: SilentRecord
    """Writes on the main rank only."""
    cost: StepCost
    check: BackgroundCheck | None
    """The check against timm, on the main rank, in progress since the start."""
    memory_basis: dict[str, Any]
    """What the micro-batch was chosen for: it is kept on resume if nothing of it changes."""

    @property
    def device(self) -> torch.device:
        return self.state.engine.device

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(self.config, self.plan).at(step)

    def is_done(self) -> bool:
        """Return whether training ends after the current step: the last one of the schedule, or out of patience."""
        return self.state.step >= self.plan.steps or self.stops_early()

    def stops_early(self) -> bool:
        """Return whether training ends before the end of its schedule, out of patience; the same on every rank."""
        state, patience = self.state, self.config.run.patience
        return state.step < self.plan.steps and self.plan.is_out_of_patience(patience, state.step, state.best_step)

    def steps(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of this rank, one list per remaining step."""
        if self.is_done():  # stopped early, but killed before it wrote its final weights
            return
        batches = iter(self.loaders.train)
        for _ in range(self.state.step, self.plan.steps):
            yield [next(batches) for _ in range(self.plan.accumulation)]

    def best_facts(self) -> dict[str, float]:
        """Return the best result so far as in the summary; empty before the first evaluation."""
        if self.state.best is None:
            return {}
        return {f"best/val/{self.task.metrics[0].name}": self.state.best, "best/step": self.state.best_step}

    def close(self) -> None:
        """Stop what runs next to the loop: data-loading workers and the checkpoint writer."""
        self.record.terminal.stop()
        with self.record.terminal.phase("Saving the checkpoint"):
            self.loaders.close()
            self.checkpoints.close()
