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


def task_class(config: Config) -> type[Task]:
    """Return the class of the task that the options name."""
    module, _, name = TASKS[config.task.name].partition(":")
    return getattr(importlib.import_module(module), name)
