"""Train a recipe from start to end."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vit_scale.config import Config
from vit_scale.cost.background_check import BackgroundCheck
from vit_scale.kernels.malloc import retain_freed_memory
from vit_scale.launcher import is_main_process, silence_libraries
from vit_scale.record.terminal import Terminal

if TYPE_CHECKING:
    from vit_scale.tasks.task import Task


class Outcome(NamedTuple):
    """How a run ended."""

    status: int
    """Exit status: 0 if it is finished, above 128 after a signal."""
    folder: Path | None
    """The run directory."""


def run_recipe(config: Config, recipe: str) -> int:
    """Train `config`, which was read from `recipe`, from start to end; returns the exit status."""
    return train_recipe(config, recipe).status


def train_recipe(config: Config, recipe: str, task_type: type[Task] | None = None) -> Outcome:
    """Train `config`, which was read from `recipe`, from start to end; `task_type`: another task than `task.name`."""
    silence_libraries()
    retain_freed_memory()  # Otherwise every step on a CPU faults in the pages of its activations again.
    gc.disable()  # Until everything is imported and built: none of it is garbage, and it saves 10% of the startup.
    # In parallel with the import of torch. After it, a fork would copy locked locks of its threads and save no time.
    check = BackgroundCheck(config.model, in_background="torch" not in sys.modules) if is_main_process() else None
    terminal = Terminal(enabled=is_main_process())  # After the fork, whose child must not inherit what is not printed.
    terminal.title(f"Training {recipe}")
    with terminal.phase("Loading libraries"):
        from vit_scale.checkpoints.run_lock import release_all
        from vit_scale.strategies.processes import init_group_after_restart
        from vit_scale.strategies.rank_failure import (
            RANK_FAILURE_EXIT_CODE,
            errors_of_ranks,
            is_rank_failure,
            report_rank_failure,
        )
        from vit_scale.train.build import build_run
        from vit_scale.train.finish import finish
        from vit_scale.train.loop import train
        from vit_scale.train.open_run import RunFinished

    run = None
    started = time.perf_counter()
    try:
        with errors_of_ranks(expected=RunFinished):
            init_group_after_restart(config.parallel.timeout_seconds)
            run = build_run(config, recipe, check, task_type=task_type, terminal=terminal)
            gc.enable()
            if run.device.type == "cpu":
                retain_freed_memory(include_large=True)
            status = train(run)
            if status == 0:
                finish(run, time.perf_counter() - started)
            return Outcome(status, run.folder)
    except RunFinished as finished:
        terminal.info(str(finished))
        return Outcome(0, finished.run_dir)
    except RuntimeError as error:
        if not is_rank_failure(error):
            raise
        if run is not None:
            run.checkpoints.abandon()
        report_rank_failure(error, run.folder if run else None, config.parallel.timeout_seconds)
        return Outcome(RANK_FAILURE_EXIT_CODE, run.folder if run else None)
    finally:
        gc.enable()
        if run is not None:
            run.close()
        release_all()
