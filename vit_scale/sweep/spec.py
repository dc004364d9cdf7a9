"""Read and validate sweep files in W&B's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from vit_scale.errors import UserError, did_you_mean, nearest
from vit_scale.recipe import load_recipe
from vit_scale.sweep.distributions import Distribution
from vit_scale.sweep.parameters import read_distribution
from vit_scale.tasks import task_class

Goal = Literal["minimize", "maximize"]
METHODS = ("grid", "random", "bayes")
KEYS = (
    *("program", "method", "metric", "parameters", "early_terminate", "command", "run_cap"),
    *("name", "description", "project", "entity"),
)
DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")


@dataclass(frozen=True)
class Metric:
    """Metric to optimize: a key of metrics.jsonl."""

    name: str
    goal: Goal = "minimize"
    target: float | None = None

    def is_met(self, value: float) -> bool:
        """Return whether `value` meets the target, so that the search can end."""
        if self.target is None:
            return False
        return value >= self.target if self.goal == "maximize" else value <= self.target


@dataclass(frozen=True)
class Hyperband:
    """At evaluations `min_iter`, `min_iter` * `eta`, ... only the best of every `eta` trials continue."""

    min_iter: int
    eta: int = 3


@dataclass(frozen=True)
class Sweep:
    """A validated sweep file."""

    path: Path
    method: str
    metric: Metric
    parameters: dict[str, Distribution]
    command: tuple[str, ...]
    program: str
    recipe: Path
    early: Hyperband | None = None
    run_cap: int | None = None
    wandb: str = "auto"
    """`track.wandb` of the trials, from recipe, parameters and options."""
    source: dict[str, Any] = field(default_factory=dict)
    """Content of the file."""

    @property
    def varied(self) -> dict[str, Distribution]:
        """Parameters with more than one value."""
        return {key: where for key, where in self.parameters.items() if where.varies}


def load_sweep(path: str | Path, options: Sequence[str] = ()) -> Sweep:
    """Load the sweep file at `path`; `options` (`a.b=value`) apply to all its trials.

    Raises `UserError` if the file, its recipe or the options are invalid.
    """
    path = Path(path)
    tree = _read(path)
    _check_keys(path, tree)
    program = str(tree.get("program", ""))
    command = tuple(map(str, _list(path, tree, "command", list(DEFAULT_COMMAND))))
    recipe = _recipe(path, command)
    sweep = Sweep(
        path=path,
        method=_one_of(path, "method", tree.get("method"), METHODS),
        metric=_metric(path, tree, recipe),
        parameters=dict(_parameters(path, tree.get("parameters"))),
        command=command,
        program=program,
        recipe=recipe,
        early=_early(path, tree.get("early_terminate")),
        run_cap=_run_cap(path, tree.get("run_cap")),
        source=tree,
    )
    _check_grid(sweep)
    if "${program}" in command and not program:
        raise UserError(f"{path}: command contains ${{program}}, but program is not set; set it to launch/train.py")
    _check_options(sweep, options)
    example = [f"{key}={where.example()}" for key, where in sweep.parameters.items()]
    return replace(sweep, wandb=load_recipe(sweep.recipe, [*example, *options]).track.wandb)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))  # like W&B's client
    except FileNotFoundError:
        near = nearest(path.name, [p.name for p in path.parent.glob("*.yaml")], cutoff=0.4)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"{path}: sweep file not found.{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read sweep file: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a sweep file must be a mapping with method, metric, parameters and command")
    return tree


def _check_keys(path: Path, tree: dict[str, Any]) -> None:
    for key in tree:
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS) or f"supported: {', '.join(KEYS)}"
            raise UserError(f"{path}: {key} is not supported in a sweep file; {hint}")


def _one_of(path: Path, key: str, value: Any, allowed: Sequence[str]) -> str:
    if value in allowed:
        return str(value)
    hint = did_you_mean(str(value), allowed)
    raise UserError(f"{path}: {key} = {value!r}: must be one of {', '.join(allowed)}{hint and '; ' + hint}")


def _list(path: Path, tree: dict[str, Any], key: str, default: list[Any]) -> list[Any]:
    value = tree.get(key, default)
    if not isinstance(value, list) or not value:
        raise UserError(f"{path}: {key} = {value!r}: must be a list")
    return value


def _metric(path: Path, tree: dict[str, Any], recipe: Path) -> Metric:
    """Return the metric of the sweep file, or the first metric of the recipe's task if the file names none."""
    if "metric" not in tree:
        best = task_class(load_recipe(recipe)).metrics[0]
        return Metric(f"val/{best.name}", "maximize" if best.higher else "minimize", None)
    spec = tree["metric"]
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise UserError(f"{path}: metric = {spec!r}: must be a mapping, e.g. {{name: val/top1, goal: maximize}}")
    if extra := set(spec) - {"name", "goal", "target"}:
        raise UserError(f"{path}: metric.{extra.pop()} is not supported; supported: name, goal and target")
    target = spec.get("target")
    if target is not None and not isinstance(target, int | float):
        raise UserError(f"{path}: metric.target = {target!r}: must be a number")
    goal = _one_of(path, "metric.goal", spec.get("goal", "minimize"), ("minimize", "maximize"))
    return Metric(spec["name"], cast(Goal, goal), target)


def _parameters(path: Path, tree: Any, prefix: str = "") -> Iterator[tuple[str, Distribution]]:
    """Yield (`section.option`, distribution) pairs; names of W&B's nested `parameters:` are joined by dots."""
    if not isinstance(tree, dict) or not tree:
        raise UserError(f"{path}: parameters{f' of {prefix[:-1]}' if prefix else ''} = {tree!r}: must be a mapping")
    for key, spec in tree.items():
        if isinstance(spec, dict) and set(spec) == {"parameters"}:
            yield from _parameters(path, spec["parameters"], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", read_distribution(f"{path}: parameters.{prefix}{key}", spec)


def _recipe(path: Path, command: Sequence[str]) -> Path:
    """Return the first YAML file in `command` after the program (files before it belong to the launcher)."""
    after_program = False
    for part in command:
        if after_program and part.endswith((".yaml", ".yml")):
            return Path(part)
        after_program |= part == "${program}" or part.endswith(".py")
    raise UserError(
        f"{path}: command contains no recipe; use for example\n"
        '  command: ["${env}", "${interpreter}", "${program}", recipes/digits.yaml, "${args}"]'
    )


def _early(path: Path, spec: Any) -> Hyperband | None:
    if spec is None:
        return None
    if not isinstance(spec, dict) or spec.get("type") != "hyperband":
        raise UserError(f"{path}: early_terminate = {spec!r}: only {{type: hyperband, min_iter: N}} is supported")
    if extra := set(spec) - {"type", "min_iter", "max_iter", "s", "eta"}:
        raise UserError(
            f"{path}: early_terminate.{extra.pop()} is not supported; supported: min_iter, max_iter, s, eta"
        )
    for key, number in spec.items():
        if key != "type" and (not isinstance(number, int) or number < (2 if key == "eta" else 1)):
            raise UserError(f"{path}: early_terminate.{key} = {number!r}: must be an integer of at least 1 (eta: 2)")
    eta = spec.get("eta", 3)
    if "min_iter" in spec:
        return Hyperband(spec["min_iter"], eta)
    if "max_iter" in spec and "s" in spec:
        return Hyperband(max(1, spec["max_iter"] // eta ** spec["s"]), eta)
    raise UserError(f"{path}: early_terminate: set min_iter, or max_iter and s")


def _run_cap(path: Path, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise UserError(f"{path}: run_cap = {value!r}: must be an integer of at least 1")


def _check_grid(sweep: Sweep) -> None:
    if sweep.method != "grid":
        return
    for key, where in sweep.parameters.items():
        if where.grid() is None:
            raise UserError(
                f"{sweep.path}: parameters.{key}: method grid requires values, int_uniform or q_uniform; "
                "for continuous ranges use method random or bayes"
            )


def _check_options(sweep: Sweep, options: Sequence[str]) -> None:
    for option in options:
        key = option.removeprefix("--").partition("=")[0]
        if key in sweep.varied:
            raise UserError(f"{option}: {key} is a parameter of {sweep.path}; remove it there to set a fixed value")
        if key == "run.dir":
            raise UserError(f"{option}: each trial has its own directory in the sweep directory, which is set by --dir")
