"""The folder of a run: which one, whether it may be gone on with, and the files at its top."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vit_scale.checkpoints import run_lock as folder_lock
from vit_scale.config import Config
from vit_scale.errors import UserError
from vit_scale.files import write_text
from vit_scale.recipe import flatten, load_recipe, to_yaml

# Options that may differ from those the run was started with.
MAY_CHANGE = {
    "schedule.steps",
    "schedule.epochs",
    "batch.micro",
    "batch.eval",
    "data.workers",
    "data.on_error",
    "data.cache",
    "data.cache_dir",
    "augment.eval_crop",
    "augment.eval_interpolation",
    "model.kernel",
}
SECTIONS_THAT_MAY_CHANGE = ("parallel.", "run.", "track.")
MAY_NOT_CHANGE = {"run.seed"}


def choose_folder(config: Config, recipe: str) -> Path:
    """The folder to train in; nothing is written yet.

    `run.dir` if it is given, else `runs/<recipe>`, or the first of `runs/<recipe>-2`, ... whose run is neither finished
    nor going on.
    What a W&B agent starts has its own, `runs/sweeps/<sweep>/<run>`: the same when W&B starts a preempted run again.
    """
    if config.run.dir is not None:
        return Path(config.run.dir)
    sweep, run = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    if sweep and run:
        return Path("runs") / "sweeps" / sweep / run
    name, number = Path(recipe).stem, 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        free = config.run.resume == "auto" and not is_finished(folder) and not folder_lock.is_in_use(folder)
        if not has_run(folder) or free:
            return folder
        number += 1


def has_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists()


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json, or nothing where there is none that can be read."""
    try:
        return json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return {}


def is_finished(folder: Path) -> bool:
    return bool(read_summary(folder).get("finished"))


def differing_options(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Options, of those that may not change, in which the run in `folder` and `config` differ: (there, here)."""
    there, here = flatten(load_recipe(folder / "config.yaml")), flatten(config)
    return {key: (there[key], here[key]) for key in here if there[key] != here[key] and not may_change(key)}


def may_change(key: str) -> bool:
    """Whether a run may be gone on with under another value of this option."""
    return key not in MAY_NOT_CHANGE and (key in MAY_CHANGE or key.startswith(SECTIONS_THAT_MAY_CHANGE))


def refuse_other_options(folder: Path, config: Config) -> None:
    """Raise `UserError` where `folder` holds a run with options that this one may not go on with."""
    differing = differing_options(folder, config)
    if differing:
        listed = "; ".join(f"{key} = {there!r} there, {here!r} here" for key, (there, here) in differing.items())
        raise UserError(
            f"{folder} holds a run with other options: {listed}.\n"
            "Choose another run.dir, or start anew with run.resume=never (the run there is kept under another name)."
        )


def set_aside(folder: Path) -> Path:
    """Rename `folder` to the first free `<folder>.old-<n>` and return that."""
    folder_lock.release(folder)
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def write_config(folder: Path, config: Config) -> None:
    """Make the folder this process's own and write config.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    folder_lock.hold(folder)
    write_text(folder / "config.yaml", to_yaml(config))
