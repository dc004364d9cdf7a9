"""What is learned: one package per task. `Task` in task.py is the interface that the loop knows."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vit_scale.config import Config

if TYPE_CHECKING:
    from vit_scale.tasks.task import Task

TASKS = {
    "classify": "vit_scale.tasks.classify.classification:Classification",
    "mae": "vit_scale.tasks.mae.masked_autoencoding:MaskedAutoencoding",
}
"""`task.name` -> where its class is."""
DISTILLATION = "vit_scale.tasks.distill.distillation:Distillation"
"""Classification with a teacher (`distill.teacher`)."""


def task_class(config: Config) -> type[Task]:
    """Return the class of the task that the options name."""
    where = TASKS[config.task.name] if config.distill.teacher is None else DISTILLATION
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
