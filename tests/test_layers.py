"""Options in layers: the later one of two that exclude each other applies, and a shorter schedule scales what no
longer fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from vit_scale.api import _as_arguments
from vit_scale.config import ALTERNATIVES, Config
from vit_scale.errors import UserError
from vit_scale.recipe import build_config, flatten, load_recipe, to_yaml
from vit_scale.schedule import Plan, auto_eval_every, auto_log_every, make_plan, scaling_note, with_decisions

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "sweeps")
VALUES = {
    "schedule.steps": 8,
    "schedule.epochs": 9,
    "schedule.warmup_steps": 2,
    "schedule.warmup_epochs": 1,
    "augment.rand_augment": "rand-m9",
    "augment.rand_magnitude": 5,
}
PAIRS = [pair for one, other in ALTERNATIVES for pair in ((one, other), (other, one))]


def plan_of(config: Config, images: int = 1000) -> Plan:
    return make_plan(config, train_images=images, processes=1, device="cpu")


def layer_with(option: str, **schedule: int) -> dict[str, dict[str, object]]:
    section, name = option.split(".")
    layer: dict[str, dict[str, object]] = {"schedule": dict(schedule)}
    layer.setdefault(section, {})[name] = VALUES[option]
    return layer


@pytest.mark.parametrize(("below", "above"), PAIRS)
def test_later_layer_replaces_what_it_excludes(tmp_path: Path, below: str, above: str) -> None:
    length = {} if below in ALTERNATIVES[0] else {"steps": 20}
    tree = layer_with(below, **length)
    by_command_line = flatten(build_config(tree, [f"{above}={VALUES[above]}"]))
    assert by_command_line[above] == VALUES[above]
    assert by_command_line[below] in (None, "")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"base": "base.yaml", **layer_with(above)}))
    assert flatten(load_recipe(tmp_path / "recipe.yaml")) == by_command_line


@pytest.mark.parametrize(("one", "other"), ALTERNATIVES)
def test_both_in_one_layer_is_an_error(one: str, other: str) -> None:
    both = [f"{one}={VALUES[one]}", f"{other}={VALUES[other]}"]
    with pytest.raises(UserError, match="both set"):
        build_config({"schedule": {"epochs": 20}}, both)


def test_binary_loss_switches_label_smoothing_of_the_recipe_off() -> None:
    recipe = {"schedule": {"steps": 1}, "augment": {"label_smoothing": 0.1}}
    assert build_config(recipe, ["optim.loss=binary"]).augment.label_smoothing == 0.0
    with pytest.raises(UserError, match="label_smoothing"):
        build_config(recipe, ["optim.loss=binary", "augment.label_smoothing=0.1"])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("length", ["schedule.steps=2", "schedule.epochs=0.001"])
def test_shorter_schedule_is_one_option_on_every_recipe(recipe: Path, length: str, tmp_path: Path) -> None:
    config = load_recipe(recipe, [length])
    plan = plan_of(config, 50_000)
    assert plan.steps <= 2
    assert plan.warmup_steps <= plan.steps
    used = with_decisions(config, plan)
    (tmp_path / "config.yaml").write_text(to_yaml(used))
    again = load_recipe(tmp_path / "config.yaml")
    assert again == used
    assert replace(plan_of(again, 50_000), save_seconds=plan.save_seconds) == plan
    note = scaling_note(config, plan)
    has_warmup = bool(config.schedule.warmup_steps or config.schedule.warmup_epochs)
    assert (note is not None) == has_warmup
    assert scaling_note(again, plan) is None


@pytest.mark.parametrize(
    ("schedule", "override", "warmup"),
    [
        ({"steps": 1000, "warmup_steps": 100}, "schedule.steps=50", 5),
        ({"steps": 1000, "warmup_steps": 100}, "schedule.steps=100", 10),
        ({"steps": 1000, "warmup_steps": 100}, "schedule.steps=101", 100),
        ({"steps": 1000, "warmup_steps": 100}, "schedule.steps=2000", 100),
        ({"epochs": 100, "warmup_epochs": 10}, "schedule.steps=50", 5),
        ({"epochs": 100, "warmup_steps": 100}, "schedule.steps=50", 5),
        ({"steps": 1000, "warmup_epochs": 10}, "schedule.epochs=5", 5),
        ({"steps": 1000, "warmup_steps": 100}, "schedule.epochs=5", 5),
    ],
)
def test_warmup_of_a_lower_layer_is_scaled_only_if_it_does_not_fit(
    schedule: dict[str, int], override: str, warmup: int
) -> None:
    """An epoch has 10 steps."""
    config = build_config({"schedule": schedule, "batch": {"global": 100}}, [override])
    assert plan_of(config).warmup_steps == warmup


def test_scaling_is_one_line_with_old_and_new() -> None:
    recipe = {"schedule": {"epochs": 100, "warmup_epochs": 10}, "augment": {"no_mix_epochs": 20}}
    config = build_config({**recipe, "batch": {"global": 100}}, ["schedule.steps=50"])
    plan = plan_of(config)
    assert (plan.warmup_steps, plan.unmixed_steps) == (5, 10)
    assert scaling_note(config, plan) == (
        "Schedule shortened to 50 steps: schedule.warmup_epochs scaled from 100 steps to 5, "
        "augment.no_mix_epochs scaled from 200 steps to 10."
    )


def test_warmup_longer_than_the_schedule_in_its_own_layer_is_an_error() -> None:
    recipe = {"schedule": {"steps": 100, "warmup_steps": 10}}
    with pytest.raises(UserError, match=r"schedule\.warmup_steps = 5: must be at most schedule\.steps = 4"):
        build_config(recipe, ["schedule.steps=4", "schedule.warmup_steps=5"])
    with pytest.raises(UserError, match="at most schedule.steps = 100"):
        build_config(recipe, ["schedule.warmup_steps=200"])
    with pytest.raises(UserError, match="warmup steps exceed"):
        plan_of(build_config(recipe, ["schedule.epochs=1", "schedule.warmup_steps=20"]), 1024 * 5)


def test_overrides_of_python_and_sweeps_are_the_command_line() -> None:
    recipe = {"schedule": {"epochs": 100, "warmup_epochs": 10}}
    for overrides in (_as_arguments({"schedule.steps": 4}), ["--schedule={'steps': 4}"], ["--schedule.steps=4"]):
        config = build_config(recipe, overrides)
        assert (config.schedule.steps, config.schedule.epochs) == (4, None)


def test_length_written_for_is_not_an_option() -> None:
    with pytest.raises(UserError, match="written_for"):
        build_config({"schedule": {"steps": 1}, "written_for": {}})
    assert "written_for" not in to_yaml(
        build_config({"schedule": {"steps": 9, "warmup_steps": 5}}, ["schedule.steps=3"])
    )


@pytest.mark.parametrize("steps", [1, 2, 5, 12, 30, 99, 100, 1348, 25_000, 300_000, 3_000_000])
def test_auto_gives_useful_output_for_every_length(steps: int) -> None:
    lines, evaluations = steps / auto_log_every(steps), steps / auto_eval_every(steps)
    assert min(steps, 60) <= lines <= 160
    assert min(steps, 12) / 2 <= evaluations <= 10 or steps <= 2
    assert auto_eval_every(steps) % auto_log_every(steps) == 0


def test_numbers_take_precedence_over_auto() -> None:
    run = {"log_every": 7, "eval_every": 9, "save_every": 11}
    plan = plan_of(build_config({"schedule": {"steps": 1000}, "run": run}))
    assert (plan.log_every, plan.eval_every, plan.save_every, plan.save_seconds) == (7, 9, 11, 0.0)
    assert [step for step in range(1, 30) if plan.is_saved(step)] == [9, 11, 18, 22, 27], "also before an evaluation"
    plan = plan_of(build_config({"schedule": {"steps": 1000}, "run": {"eval_every": 9}}))
    assert (plan.log_every, plan.save_every, plan.save_seconds) == (10, 9, 600.0)
