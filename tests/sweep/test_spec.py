"""Sweep files: the provided ones, W&B's distributions, and errors in invalid files."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from vit_scale.errors import UserError
from vit_scale.recipe import load_recipe
from vit_scale.sweep.command import build_command, command_for_recipe
from vit_scale.sweep.parameters import read_distribution
from vit_scale.sweep.search import Search, grid
from vit_scale.sweep.spec import Hyperband, Sweep, load_sweep

PROVIDED = ["lr", "augment", "drop_path", "processes"]
COMMAND = ["${env}", "${interpreter}", "launch/train.py", "recipes/digits.yaml", "${args}"]


@pytest.fixture(autouse=True)
def _in_repository(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)


def sweep_of(tmp_path: Path, **changes: Any) -> Sweep:
    tree = {
        "method": "random",
        "metric": {"name": "val/top1", "goal": "maximize"},
        "parameters": {"optim.lr": {"value": 1.0}},
        "command": COMMAND,
    }
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(tree | changes, sort_keys=False))
    return load_sweep(path)


def test_default_metric_is_the_first_of_the_task(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    tree = {"method": "random", "parameters": {"optim.lr": {"value": 1.0}}, "command": COMMAND}
    path.write_text(yaml.safe_dump(tree))
    metric = load_sweep(path).metric
    assert (metric.name, metric.goal) == ("val/top1", "maximize")


def draws(spec: dict[str, Any], count: int = 400) -> list[Any]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    where = read_distribution("here", spec)
    return [where.draw(study.ask(), "key") for _ in range(count)]


# ------------------------------------------------------------------------------------------------------- provided files


@pytest.mark.parametrize("name", PROVIDED)
def test_every_draw_of_a_provided_file_is_a_valid_run(name: str, tmp_path: Path) -> None:
    sweep = load_sweep(f"recipes/sweeps/{name}.yaml")
    search = Search(sweep, tmp_path)
    for _ in range(min(8, len(grid(sweep)) if sweep.method == "grid" else 8)):
        trial, values = search.next() or pytest.fail("the grid ended too early")
        load_recipe(sweep.recipe, [f"--{key}={value}" for key, value in values.items()])
        search.finish(trial, 0.5)
    assert sweep.metric.name in ("val/top1", "val_ema/top1")


@pytest.mark.parametrize("name", PROVIDED)
def test_wandb_accepts_a_provided_file(name: str) -> None:
    from wandb.apis.public.sweeps import _validate_config_and_fill_distribution

    filled = _validate_config_and_fill_distribution(yaml.safe_load(Path(f"recipes/sweeps/{name}.yaml").read_text()))
    bounds = [spec[key] for spec in filled["parameters"].values() for key in ("min", "max", "q") if key in spec]
    assert all(isinstance(number, int | float) for number in bounds), (
        "W&B reads 1e-4 without a decimal point as a string"
    )


def test_provided_files_match_their_descriptions() -> None:
    sweeps = {name: load_sweep(f"recipes/sweeps/{name}.yaml") for name in PROVIDED}
    assert sweeps["lr"].method == "bayes"
    assert sweeps["lr"].early == Hyperband(min_iter=1, eta=3)
    assert set(sweeps["lr"].varied) == {"optim.lr", "optim.weight_decay"}
    assert sweeps["augment"].method == "random"
    assert len(grid(sweeps["drop_path"])) == 9
    assert sweeps["processes"].command[1:3] == ("accelerate", "launch"), (
        "two words, otherwise the agent does not find the program"
    )


# -------------------------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize(
    ("spec", "low", "high"),
    [
        ({"min": 2, "max": 5}, 2, 5),
        ({"min": 0.5, "max": 2}, 0.5, 2),
        ({"distribution": "log_uniform_values", "min": 1.0e-4, "max": 1.0}, 1e-4, 1),
        ({"distribution": "log_uniform", "min": -2, "max": 0}, math.exp(-2), 1),
        ({"distribution": "inv_log_uniform", "min": 0, "max": 2}, math.exp(-2), 1),
        ({"distribution": "inv_log_uniform_values", "min": 0.1, "max": 1}, 0.1, 1),
        ({"distribution": "log_normal", "mu": 0, "sigma": 0.5}, 0, math.exp(4)),
        ({"distribution": "q_log_normal", "mu": 3, "sigma": 0.5, "q": 8}, 0, 500),
    ],
)
def test_draws_stay_within_bounds_and_fill_them(spec: dict[str, Any], low: float, high: float) -> None:
    values = draws(spec)
    assert all(low <= value <= high for value in values)
    assert len(set(values)) > 3


def test_log_uniform_draws_have_the_expected_mean() -> None:
    values = draws({"distribution": "log_uniform_values", "min": 1.0e-4, "max": 1.0})
    assert statistics.mean(map(math.log10, values)) == pytest.approx(-2, abs=0.2)


def test_normal_draws_have_the_expected_mean_and_std() -> None:
    values = draws({"distribution": "normal", "mu": 3, "sigma": 2}, 2000)
    assert statistics.mean(values) == pytest.approx(3, abs=0.2)
    assert statistics.stdev(values) == pytest.approx(2, abs=0.2)


def test_draws_follow_the_probabilities() -> None:
    values = draws({"values": ["a", "b"], "probabilities": [0.9, 0.1]}, 2000)
    assert values.count("a") / 2000 == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"distribution": "q_uniform", "min": 0.0, "max": 0.4, "q": 0.1}, {0.0, 0.1, 0.2, 0.3, 0.4}),
        ({"distribution": "q_uniform", "min": 16, "max": 64, "q": 16}, {16, 32, 48, 64}),
        ({"distribution": "q_log_uniform_values", "min": 1, "max": 4}, {1, 2, 3, 4}),
        ({"distribution": "q_log_uniform", "min": 0, "max": 1}, {1, 2, 3}),
        ({"distribution": "int_uniform", "min": 1, "max": 3}, {1, 2, 3}),
        ({"values": [2, "two", True, 0.5]}, {2, "two", True, 0.5}),
        ({"value": "one"}, {"one"}),
    ],
)
def test_quantized_and_categorical_draws_are_exactly_the_values(spec: dict[str, Any], expected: set[Any]) -> None:
    values = draws(spec)
    assert set(values) == expected
    types = {type(value) for value in expected}
    assert {type(value) for value in values} == types, "batch.global=16.0 would be rejected"


def test_lists_can_be_chosen() -> None:
    assert [0.5, 1.0] in draws({"values": [[0.08, 1.0], [0.5, 1.0]]})


def test_nested_parameters_become_dotted_options(tmp_path: Path) -> None:
    nested = {"optim": {"parameters": {"lr": {"min": 0.1, "max": 0.2}, "weight_decay": {"value": 0.1}}}}
    assert list(sweep_of(tmp_path, parameters=nested).parameters) == ["optim.lr", "optim.weight_decay"]


def test_grid_has_every_combination_once(tmp_path: Path) -> None:
    parameters = {
        "model.depth": {"min": 1, "max": 3},
        "model.drop_path": {"distribution": "q_uniform", "min": 0.0, "max": 0.1, "q": 0.05},
        "optim.name": {"value": "adamw"},
    }
    sweep = sweep_of(tmp_path, method="grid", parameters=parameters)
    search, seen = Search(sweep, tmp_path), []
    while (suggestion := search.next()) is not None:
        trial, values = suggestion
        seen.append(values)
        search.finish(trial, 0.0)
    assert seen == grid(sweep)
    assert len(seen) == 9


def test_bayesian_search_finds_the_optimum_that_random_draws_miss(tmp_path: Path) -> None:
    parameters = {"optim.lr": {"distribution": "log_uniform_values", "min": 1.0e-6, "max": 1.0}}

    def distance(method: str) -> float:
        folder = tmp_path / method
        folder.mkdir()
        search = Search(sweep_of(folder, method=method, parameters=parameters), folder)
        misses = []
        for _ in range(25):
            trial, values = search.next() or pytest.fail("the search ended")
            misses.append(abs(math.log10(values["optim.lr"] / 3e-4)))
            search.finish(trial, 1 - misses[-1])
        return statistics.mean(misses[-10:])

    assert distance("bayes") < 0.5 * distance("random")


# -------------------------------------------------------------------------------------------------------------- command


def test_macros_expand_as_in_the_wandb_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    monkeypatch.setenv("SOME_DIR", "here")
    values = {"optim.lr": 0.001, "ema.warmup": False, "parallel.compile": True, "augment.crop_scale": [0.1, 1.0]}
    reference = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    for macro in ("args", "args_no_hyphens", "args_no_equals", "args_no_boolean_flags", "args_json"):
        sweep = sweep_of(tmp_path, command=["${env}", "launch/train.py", "recipes/digits.yaml", f"${{{macro}}}"])
        assert build_command(sweep, values)[3:] == reference[macro], macro
    fixed = ["launch/train.py", "recipes/digits.yaml", "run.dir=${envvar:SOME_DIR}/x"]
    assert build_command(sweep_of(tmp_path, command=fixed), {}) == create_sweep_command(list(fixed))


def test_best_recipe_is_trained_with_the_sweeps_launcher() -> None:
    command = command_for_recipe(load_sweep("recipes/sweeps/processes.yaml"), Path("best.yaml"))
    assert command.startswith("accelerate launch --multi_gpu --num_processes 2")
    assert command.endswith("launch/train.py best.yaml")


# -------------------------------------------------------------------------------------------------------- invalid files


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"distribution": "beta", "a": 1}, "'beta' is not supported"),
        ({"distribution": "uniform", "min": 0.1}, "uniform requires max"),
        ({"min": 0.1, "max": 0.2, "q": 1}, "uniform does not support q"),
        ({"min": "1e-5", "max": 0.1}, "a string, write 1.0e-05"),
        ({"min": 2.0, "max": 1.0}, "min = 2.0 is greater than max = 1.0"),
        ({"distribution": "log_uniform_values", "min": 0, "max": 1}, "greater than 0"),
        ({"distribution": "int_uniform", "min": 0.5, "max": 1}, "requires integers"),
        ({"distribution": "q_uniform", "min": 0, "max": 1, "q": 0}, "q must be greater than 0"),
        ({"values": []}, "at least one value"),
        ({"values": [None, 1]}, "write the string 'null' in quotes"),
        ({"values": [1, 2], "probabilities": [1.0]}, "a list of 2 numbers"),
        ({"values": [1, 2], "probabilities": [0.5, 0.6]}, "sum to 1"),
        ({"max": 1}, "set value, values, min and max, or a distribution"),
        (0.1, "must be a mapping, e.g."),
    ],
)
def test_invalid_parameter_is_named(spec: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sweep\.yaml: parameters\.optim\.lr") as error:
        sweep_of(tmp_path, parameters={"optim.lr": spec})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "grid", "parameters": {"optim.lr": {"min": 0.1, "max": 0.2}}}, "method grid requires values"),
        ({"parameters": {}}, "parameters = {}: must be a mapping"),
        ({"metric": {"name": "val/top1", "goal": "maximise"}}, "did you mean maximize?"),
        ({"metric": {"name": "val/top1", "impute": 1}}, "metric.impute is not supported"),
        ({"early_terminate": {"type": "hyperband"}}, "set min_iter, or max_iter and s"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 1, "strict": True}}, "early_terminate.strict"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 0}}, "early_terminate.min_iter = 0"),
        ({"run_cap": 0}, "run_cap = 0"),
        ({"command": "python launch/train.py"}, "command = 'python launch/train.py': must be a list"),
        ({"command": ["${program}", "recipes/digits.yaml"]}, "program is not set"),
        ({"scheduler": {"engine": "ax"}}, "scheduler is not supported"),
    ],
)
def test_invalid_file_error_names_the_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        sweep_of(tmp_path, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(("text", "message"), [("[1", "invalid YAML"), ("- 1", "be a mapping"), ("", "be a mapping")])
def test_file_that_is_not_a_sweep_is_rejected(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_sweep(tmp_path / "sweep.yaml")


def test_hyperband_accepts_max_iter_and_s(tmp_path: Path) -> None:
    early = {"type": "hyperband", "max_iter": 27, "s": 2}
    assert sweep_of(tmp_path, early_terminate=early).early == Hyperband(min_iter=3, eta=3)
