"""`vit_scale.train`: what `launch/train.py` does, from Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_scale.errors import UserError
from vit_scale.recipe import build_config, load_recipe

if TYPE_CHECKING:
    from vit_scale.inference.loaded_run import LoadedRun
    from vit_scale.tasks.task import Task


def train(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    task: type[Task] | None = None,
) -> LoadedRun:
    """Train a recipe to its end and return the finished run, ready to use.

        run = vit_scale.train("recipes/digits.yaml", {"optim.lr": 2e-3})

    `recipe`: a YAML file, or its content as a mapping of sections. `overrides`: `{"section.option": value}`, or
    `["section.option=value"]` as on the command line. `task`: a task of your own instead of `task.name`. Under a
    launcher of several processes every process must call it. Raises `UserError` for invalid input, and
    `KeyboardInterrupt` if a signal stopped the run; call it again with the same `run.dir` to resume.
    """
    from vit_scale.inference.loaded_run import load_run
    from vit_scale.strategies.processes import restored_process, wait_for_all
    from vit_scale.train.run_recipe import train_recipe

    changes = _as_arguments(overrides)
    if isinstance(recipe, Mapping):
        config, name = build_config(dict(recipe), changes), "recipe"
    else:
        config, name = load_recipe(recipe, changes), str(recipe)
    with restored_process():
        outcome = train_recipe(config, name, task)
        wait_for_all()  # The main process writes the final weights.
    if outcome.status >= 128:
        raise KeyboardInterrupt(f"training was stopped by a signal; {outcome.folder} has its last checkpoint")
    if outcome.status or outcome.folder is None:
        raise UserError(f"training failed with status {outcome.status}; see the message above")
    return load_run(outcome.folder, task_type=task)


def _as_arguments(overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    if isinstance(overrides, Mapping):
        return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()]
    return list(overrides)
