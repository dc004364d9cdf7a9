"""Open a run directory: choose it, find the checkpoint to resume from, and check that the options match."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from vit_scale.checkpoints import run_lock
from vit_scale.checkpoints.find import find_checkpoint, is_checkpoint_name, read_meta
from vit_scale.checkpoints.run_dir import has_run, is_finished, read_summary, rename_run_dir, runs_of
from vit_scale.config import Config
from vit_scale.errors import UserError
from vit_scale.files import write_text
from vit_scale.recipe import flatten, load_recipe, to_yaml
from vit_scale.schedule import Plan

# Options that may differ from those the run was started with.
MAY_CHANGE = {
    "schedule.steps",
    "schedule.epochs",
    "schedule.warmup_steps",
    "schedule.warmup_epochs",
    "augment.no_mix_epochs",
    "batch.micro",
    "batch.eval",
    "data.workers",
    "data.on_error",
    "data.cache",
    "data.cache_dir",
    "augment.eval_crop",
    "augment.eval_interpolation",
    "model.kernel",
    "distill.teacher",  # its checksum is a fact of the task
}
SECTIONS_THAT_MAY_CHANGE = ("parallel.", "run.", "track.")
MAY_NOT_CHANGE = {"run.seed"}


class RunFinished(Exception):
    """The requested run is already finished; not an error."""

    def __init__(self, run_dir: Path, message: str) -> None:
        super().__init__(run_dir, message)
        self.run_dir, self.message = run_dir, message

    def __str__(self) -> str:
        return self.message


class OpenedRun(NamedTuple):
    """A run directory, the checkpoint to resume from, and messages for the user."""

    run_dir: Path
    checkpoint: Path | None
    messages: list[str]
    is_rollback: bool = False
    """Whether an option selects the checkpoint: what the run recorded after it is renamed, not deleted."""


def open_run(config: Config, recipe: str, plan: Plan, task: dict[str, Any]) -> OpenedRun:
    """Choose and lock the run directory; an existing run is resumed or renamed, never overwritten.

    `task` is `Task.describe()`: a checkpoint of another task, or with other facts, is rejected.
    """
    run_dir = choose_run_dir(config, recipe)
    if has_run(run_dir):
        run_lock.acquire(run_dir)
        if config.run.resume == "never":
            return OpenedRun(run_dir, None, [f"Renamed the existing run {run_dir} to {rename_run_dir(run_dir)}."])
        check_same_options(run_dir, config)
    resume = config.run.resume
    is_repeated = is_checkpoint_name(resume) and read_summary(run_dir).get("resume") == resume
    checkpoint, messages = find_checkpoint("auto" if is_repeated else resume, run_dir)
    if is_repeated:
        messages.append(f"Already rolled back to {resume}; run.resume={run_dir}/checkpoints/{resume} does it again.")
    if checkpoint is not None:
        check_same_task(checkpoint, task)
        meta = read_meta(checkpoint)
        step = meta["step"]
        early = plan.is_out_of_patience(config.run.patience, step, meta["best_step"])
        if (step >= plan.steps or early) and (is_finished(run_dir) or not has_run(run_dir)):
            longer = "longer schedule" if step >= plan.steps else "larger run.patience"
            early_stop = "" if step >= plan.steps else f", stopped early by run.patience = {config.run.patience}"
            raise RunFinished(
                run_dir,
                f"The run in {run_dir} is finished (step {step:,}/{plan.steps:,}{early_stop}).\n"
                f"Use a {longer} to continue it, run.resume=never to start from scratch, or roll it back to a "
                "checkpoint of --list-checkpoints.",
            )
        messages.append(f"Resuming from {checkpoint} (step {step:,}/{plan.steps:,}).")
    is_rollback = not is_repeated and resume not in ("auto", "never") and has_run(run_dir)
    return OpenedRun(run_dir, checkpoint, messages, is_rollback)


def choose_run_dir(config: Config, recipe: str) -> Path:
    """Return the run directory; write nothing.

    This is `run.dir` if set, otherwise `runs/<recipe>`, or the first of `runs/<recipe>-2`, ... whose run is neither
    finished nor in progress. Runs of a W&B agent use `runs/sweeps/<sweep>/<run>`: the same one when W&B restarts a
    preempted run. To roll back to a checkpoint by its name, it is the latest run.
    """
    if config.run.dir is not None:
        return Path(config.run.dir)
    sweep, run = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    if sweep and run:
        return Path("runs") / "sweeps" / sweep / run
    if is_checkpoint_name(config.run.resume) and (latest := runs_of(recipe)):
        return latest[0]
    name, number = Path(recipe).stem, 1
    while True:
        run_dir = Path("runs") / (name if number == 1 else f"{name}-{number}")
        free = config.run.resume == "auto" and not is_finished(run_dir) and not run_lock.is_in_use(run_dir)
        if not has_run(run_dir) or free:
            return run_dir
        number += 1


def check_same_options(run_dir: Path, config: Config) -> None:
    """Raise `UserError` if the run in `run_dir` has different options that may not change."""
    differing = differing_options(run_dir, config)
    if differing:
        listed = "; ".join(f"{key} = {old!r} (existing), {new!r} (requested)" for key, (old, new) in differing.items())
        raise UserError(
            f"{run_dir} contains a run with different options: {listed}.\n"
            "Choose another run.dir, or start from scratch with run.resume=never (the existing run is renamed)."
        )


def check_same_task(checkpoint: Path, task: dict[str, Any]) -> None:
    """Raise `UserError` if `checkpoint` belongs to another task, or its task depends on other facts (a teacher)."""
    recorded = read_meta(checkpoint).get("task") or {}  # none in earlier versions
    for key in ("name", "facts"):
        requested = json.loads(json.dumps(task[key], default=str))  # as it would be recorded
        existing = recorded.get(key, requested)
        if existing != requested:
            raise UserError(
                f"{checkpoint}: a checkpoint of another task: {key} = {existing!r} (existing), "
                f"{requested!r} (requested).\n"
                "Choose another run.dir, or start from scratch with run.resume=never."
            )


def differing_options(run_dir: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the (existing, requested) values of options that differ and may not change."""
    existing, requested = flatten(load_recipe(run_dir / "config.yaml")), flatten(config)
    return {
        key: (existing[key], requested[key])
        for key in requested
        if existing[key] != requested[key] and not may_change(key)
    }


def may_change(key: str) -> bool:
    """Return whether a run may be resumed with another value of this option."""
    return key not in MAY_NOT_CHANGE and (key in MAY_CHANGE or key.startswith(SECTIONS_THAT_MAY_CHANGE))


def write_config(run_dir: Path, config: Config) -> None:
    """Create and lock `run_dir`, and write config.yaml."""
    run_dir.mkdir(parents=True, exist_ok=True)
    run_lock.acquire(run_dir)
    write_text(run_dir / "config.yaml", to_yaml(config))
