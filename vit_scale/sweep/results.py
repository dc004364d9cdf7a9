"""Results of a sweep: its ranked trials as a table, and the best as a recipe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vit_scale.files import write_text
from vit_scale.recipe import flatten, load_recipe
from vit_scale.sweep.command import command_for_recipe
from vit_scale.sweep.spec import Sweep

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial
    from rich.table import Table

STATES = {"COMPLETE": "finished", "PRUNED": "stopped early", "FAIL": "failed", "RUNNING": "interrupted"}


@dataclass(frozen=True)
class Result:
    """A trial: its parameter values, final state, and last value of the metric, if any."""

    number: int
    state: str
    value: float | None
    values: dict[str, Any]
    problem: str = ""


def ranked(study: Study, goal: str) -> list[Result]:
    """Return all trials: finished trials starting with the best, then trials stopped early, then the rest."""
    results = [_result(trial) for trial in study.trials if trial.state.name in STATES]
    sign = -1 if goal == "maximize" else 1
    order = list(STATES.values())
    return sorted(results, key=lambda r: (order.index(r.state), sign * (r.value or 0.0), r.number))


def _result(trial: FrozenTrial) -> Result:
    reported = trial.intermediate_values
    value = trial.value if trial.value is not None else reported[max(reported)] if reported else None
    attributes = trial.user_attrs
    return Result(
        trial.number, STATES[trial.state.name], value, attributes.get("values", {}), attributes.get("problem", "")
    )


def trial_name(number: int) -> str:
    """Return the name of a trial's directory."""
    return f"trial-{number:03d}"


def show_value(value: Any) -> str:
    """Format a value for display."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def table(results: Sequence[Result], sweep: Sweep) -> Table:
    """Build the ranked table: rank, trial, metric, varied parameters, state."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    title = f"{sweep.path}: {sweep.metric.name}, {sweep.metric.goal}d"
    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in ("", "trial", sweep.metric.name, *sweep.varied, ""):
        shown.add_column(name.replace(".", ".\n"), justify="right", vertical="bottom")
    for rank, result in enumerate(results, 1):
        finished = result.state == "finished"
        value = "" if result.value is None else f"{result.value:.4f}"
        varied = [escape(show_value(result.values.get(key, ""))) for key in sweep.varied]
        end = "" if finished else result.state
        style = "bold" if rank == 1 and finished else None if finished else "dim"
        shown.add_row(str(rank) if finished else "", str(result.number), value, *varied, end, style=style)
    return shown


def write_best(directory: Path, best: Result, sweep: Sweep, options: Sequence[str], trials: int) -> Path:
    """Write `best.yaml`, the sweep's recipe as `base:` with the options of the best trial; returns its path."""
    path = directory / "best.yaml"
    pairs = [*(f"{key}={value}" for key, value in best.values.items()), *options]
    keys = [pair.removeprefix("--").partition("=")[0] for pair in pairs]
    merged = flatten(load_recipe(sweep.recipe, pairs))
    tree: dict[str, Any] = {"base": os.path.relpath(sweep.recipe, directory)}
    for key in keys:
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = merged[key]
    card = (
        f"# Best of {trials} trials of {sweep.path}: {sweep.metric.name} = {best.value:.4f}, "
        f"{trial_name(best.number)}.\n# Command:  {command_for_recipe(sweep, path)}\n"
    )
    write_text(path, card + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    return path
