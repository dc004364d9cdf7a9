"""A run: everything that the loop needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

    @property
    def device(self) -> torch.device:
        return self.state.engine.device

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(self.config, self.plan).at(step)

    def steps(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of this rank, one list per remaining step."""
        batches = iter(self.loaders.train)
        for _ in range(self.state.step, self.plan.steps):
            yield [next(batches) for _ in range(self.plan.accumulation)]

    def close(self) -> None:
        """Stop what runs next to the loop: data-loading workers and the checkpoint writer."""
        self.record.terminal.stop()
        self.loaders.close()
        self.checkpoints.close()
