"""Sweep files: those that are shipped, W&B's distributions, and what is said of a bad file."""

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

SHIPPED = ["lr", "augment", "drop_path", "processes"]
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


def draws(spec: dict[str, Any], count: int = 400) -> list[Any]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    where = read_distribution("here", spec)
    return [where.draw(study.ask(), "key") for _ in range(count)]


# -------------------------------------------------------------------------------------------------------- shipped files


@pytest.mark.parametrize("name", SHIPPED)
def test_every_draw_of_a_shipped_file_is_a_valid_training(name: str, tmp_path: Path) -> None:
    sweep = load_sweep(f"recipes/sweeps/{name}.yaml")
    search = Search(sweep, tmp_path)
    for _ in range(min(8, len(grid(sweep)) if sweep.method == "grid" else 8)):
        trial, values = search.next() or pytest.fail("a grid that ends too soon")
        load_recipe(sweep.recipe, [f"--{key}={value}" for key, value in values.items()])
        search.finish(trial, 0.5)
    assert sweep.metric.name in ("val/top1", "val_ema/top1")


@pytest.mark.parametrize("name", SHIPPED)
def test_wandb_itself_accepts_a_shipped_file(name: str) -> None:
    from wandb.apis.public.sweeps import _validate_config_and_fill_distribution

    filled = _validate_config_and_fill_distribution(yaml.safe_load(Path(f"recipes/sweeps/{name}.yaml").read_text()))
    bounds = [spec[key] for spec in filled["parameters"].values() for key in ("min", "max", "q") if key in spec]
    assert all(isinstance(number, int | float) for number in bounds), "1e-4 without a point is text to W&B"


def test_shipped_files_are_what_they_say() -> None:
    sweeps = {name: load_sweep(f"recipes/sweeps/{name}.yaml") for name in SHIPPED}
    assert sweeps["lr"].method == "bayes"
    assert sweeps["lr"].early == Hyperband(min_iter=1, eta=3)
    assert set(sweeps["lr"].varied) == {"optim.lr", "optim.weight_decay"}
    assert sweeps["augment"].method == "random"
    assert len(grid(sweeps["drop_path"])) == 9
    assert sweeps["processes"].command[1:3] == ("accelerate", "launch"), "two words, or the agent finds no such program"


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


def test_logarithmic_draws_have_the_geometric_mean_in_the_middle() -> None:
    values = draws({"distribution": "log_uniform_values", "min": 1.0e-4, "max": 1.0})
    assert statistics.mean(map(math.log10, values)) == pytest.approx(-2, abs=0.2)


def test_normal_draws_have_mean_and_deviation() -> None:
    values = draws({"distribution": "normal", "mu": 3, "sigma": 2}, 2000)
    assert statistics.mean(values) == pytest.approx(3, abs=0.2)
    assert statistics.stdev(values) == pytest.approx(2, abs=0.2)


def test_probabilities_are_kept() -> None:
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
def test_quantised_and_chosen_draws_are_exactly_the_values(spec: dict[str, Any], expected: set[Any]) -> None:
    values = draws(spec)
    assert set(values) == expected
    whole = {type(value) for value in expected}
    assert {type(value) for value in values} == whole, "batch.global=16.0 would be refused"


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
    while (asked := search.next()) is not None:
        trial, values = asked
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
            trial, values = search.next() or pytest.fail("a search without end ended")
            misses.append(abs(math.log10(values["optim.lr"] / 3e-4)))
            search.finish(trial, 1 - misses[-1])
        return statistics.mean(misses[-10:])

    assert distance("bayes") < 0.5 * distance("random")


# -------------------------------------------------------------------------------------------------------------- command


def test_macros_expand_as_wandbs_agent_expands_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    monkeypatch.setenv("SOME_FOLDER", "here")
    values = {"optim.lr": 0.001, "ema.warmup": False, "parallel.compile": True, "augment.crop_scale": [0.1, 1.0]}
    reference = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    for macro in ("args", "args_no_hyphens", "args_no_equals", "args_no_boolean_flags", "args_json"):
        sweep = sweep_of(tmp_path, command=["${env}", "launch/train.py", "recipes/digits.yaml", f"${{{macro}}}"])
        assert build_command(sweep, values)[3:] == reference[macro], macro
    fixed = ["launch/train.py", "recipes/digits.yaml", "run.dir=${envvar:SOME_FOLDER}/x"]
    assert build_command(sweep_of(tmp_path, command=fixed), {}) == create_sweep_command(list(fixed))


def test_the_best_is_trained_by_the_sweeps_own_launcher() -> None:
    said = command_for_recipe(load_sweep("recipes/sweeps/processes.yaml"), Path("best.yaml"))
    assert said.startswith("accelerate launch --multi_gpu --num_processes 2")
    assert said.endswith("launch/train.py best.yaml")


# ------------------------------------------------------------------------------------------------------------ bad files


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"distribution": "beta", "a": 1}, "'beta' is not supported"),
        ({"distribution": "uniform", "min": 0.1}, "uniform lacks max"),
        ({"min": 0.1, "max": 0.2, "q": 1}, "uniform has no use for q"),
        ({"min": "1e-5", "max": 0.1}, "W&B's YAML reads that as text, write 1.0e-05"),
        ({"min": 2.0, "max": 1.0}, "min = 2.0 is greater than max = 1.0"),
        ({"distribution": "log_uniform_values", "min": 0, "max": 1}, "greater than 0"),
        ({"distribution": "int_uniform", "min": 0.5, "max": 1}, "takes whole numbers"),
        ({"distribution": "q_uniform", "min": 0, "max": 1, "q": 0}, "q must be greater than 0"),
        ({"values": []}, "at least one value"),
        ({"values": [None, 1]}, "write the text 'null', in quotes"),
        ({"values": [1, 2], "probabilities": [1.0]}, "a list of 2 numbers"),
        ({"values": [1, 2], "probabilities": [0.5, 0.6]}, "add up to 1"),
        ({"max": 1}, "give value, values, min and max, or a distribution"),
        (0.1, "must be a mapping such as"),
    ],
)
def test_bad_parameter_is_named(spec: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sweep\.yaml: parameters\.optim\.lr") as error:
        sweep_of(tmp_path, parameters={"optim.lr": spec})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "grid", "parameters": {"optim.lr": {"min": 0.1, "max": 0.2}}}, "a grid needs values"),
        ({"parameters": {}}, "parameters = {}: must be a mapping"),
        ({"metric": {"name": "val/top1", "goal": "maximise"}}, "did you mean maximize?"),
        ({"metric": {"name": "val/top1", "impute": 1}}, "metric.impute is not supported"),
        ({"early_terminate": {"type": "hyperband"}}, "give min_iter, or max_iter and s"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 1, "strict": True}}, "early_terminate.strict"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 0}}, "early_terminate.min_iter = 0"),
        ({"run_cap": 0}, "run_cap = 0"),
        ({"command": "python launch/train.py"}, "command = 'python launch/train.py': must be a list"),
        ({"command": ["${program}", "recipes/digits.yaml"]}, "program is not given"),
        ({"scheduler": {"engine": "ax"}}, "scheduler is not supported"),
    ],
)
def test_bad_file_is_told_by_its_key(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        sweep_of(tmp_path, **changes)
    assert said in str(error.value)


@pytest.mark.parametrize(("text", "said"), [("[1", "is not valid YAML"), ("- 1", "is a mapping"), ("", "is a mapping")])
def test_file_that_is_no_sweep(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        load_sweep(tmp_path / "sweep.yaml")


def test_bands_by_their_largest_are_understood(tmp_path: Path) -> None:
    early = {"type": "hyperband", "max_iter": 27, "s": 2}
    assert sweep_of(tmp_path, early_terminate=early).early == Hyperband(min_iter=3, eta=3)
