"""The commands suggested at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from vit_scale.tasks.classify.classification import Classification
from vit_scale.tasks.mae.masked_autoencoding import MaskedAutoencoding
from vit_scale.tasks.task import Task
from vit_scale.train.finish import _next_commands


class Custom(Classification):
    name = "custom"


class BuiltIn(Classification):
    """Like a task in `TASKS` other than classification."""

    commands = Task.commands


@pytest.mark.parametrize(
    ("task", "scripts"),
    [
        (Classification, ["show_run.py", "eval.py", "predict.py"]),
        (MaskedAutoencoding, ["show_run.py", "eval.py", "probe.py", "train.py"]),
        (BuiltIn, ["show_run.py", "eval.py"]),
        (Custom, ["show_run.py"]),
    ],
)
def test_only_commands_that_support_the_task_are_suggested(task: type[Task], scripts: list[str]) -> None:
    commands = _next_commands(Path("runs/my run"), task, None)
    assert [command.split()[1] for command in commands] == [f"launch/{script}" for script in scripts]
    assert all("runs/my run'" in command for command in commands), "quoted"


def test_upload_is_suggested_last_if_wandb_does_not_have_everything() -> None:
    assert list(_next_commands(Path("runs/x"), Custom, "wandb sync runs/x/wandb"))[-1] == "wandb sync runs/x/wandb"
