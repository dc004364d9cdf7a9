"""Table, plot and best recipe at the end of a sweep."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from vit_scale.recipe import load_recipe
from vit_scale.sweep.plot import panel_figure, write_plot
from vit_scale.sweep.results import Result, ranked, table, write_best
from vit_scale.sweep.search import Search
from vit_scale.sweep.spec import Sweep, load_sweep

PARAMETERS = {
    "optim.lr": {"distribution": "log_uniform_values", "min": 1.0e-4, "max": 1.0e-2},
    "augment.crop_scale": {"values": [[0.08, 1.0], [0.5, 1.0]]},
    "optim.weight_decay": {"values": ["1e-2", "null"]},
    "optim.name": {"value": "adamw"},
}
RESULTS = [
    Result(2, "finished", 0.9, {"optim.lr": 1e-3, "augment.crop_scale": [0.5, 1.0], "optim.weight_decay": "1e-2"}),
    Result(0, "finished", 0.8, {"optim.lr": 2e-3, "augment.crop_scale": [0.08, 1.0], "optim.weight_decay": "1e-2"}),
    Result(1, "stopped early", 0.5, {"optim.lr": 3e-3, "augment.crop_scale": [0.5, 1.0], "optim.weight_decay": "1e-2"}),
    Result(3, "failed", None, {"optim.lr": 4e-3, "augment.crop_scale": [0.5, 1.0], "optim.weight_decay": "1e-2"}, "no"),
]


@pytest.fixture
def sweep(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.chdir(root)
    command = ["python", "launch/train.py", "recipes/digits.yaml", "${args}"]
    tree = {"method": "random", "metric": {"name": "val/top1", "goal": "maximize"}, "parameters": PARAMETERS}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree | {"command": command}, sort_keys=False))
    return load_sweep(tmp_path / "sweep.yaml")


def test_ranking_follows_the_goal_with_unfinished_trials_last(sweep: Sweep, tmp_path: Path) -> None:
    search = Search(sweep, tmp_path)
    for value in (0.3, 0.9, 0.6):
        trial, _ = search.next() or pytest.fail("no trial")
        search.finish(trial, value)
    trial, _ = search.next() or pytest.fail("no trial")
    search.report(trial, 0, 0.99)
    search.stop(trial)
    trial, _ = search.next() or pytest.fail("no trial")
    search.fail(trial, "out of memory")
    assert [result.number for result in ranked(search.study, "maximize")] == [1, 2, 0, 3, 4]
    assert [result.number for result in ranked(search.study, "minimize")] == [0, 2, 1, 3, 4]
    assert ranked(search.study, "maximize")[-1].problem == "out of memory"
    assert search.done == 4
    assert search.best == 0.9


def test_table_shows_varied_parameters_and_trial_states(sweep: Sweep) -> None:
    console = Console(width=140, file=io.StringIO())
    console.print(table(RESULTS, sweep))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("val/top1", "0.001", "0.9000", "[0.5, 1.0]", "stopped early", "failed"):
        assert part in shown
    assert "adamw" not in shown, "constants are omitted"


def test_plot_shows_the_metric_over_each_varied_parameter(sweep: Sweep) -> None:
    over_lr = panel_figure("optim.lr", RESULTS, sweep)
    assert over_lr["x"] == {"log": True, "categories": None}
    points = {each["name"]: list(zip(each["x"]["optim.lr"], each["y"], strict=True)) for each in over_lr["series"]}
    assert points == {"finished": [(1e-3, 0.9), (2e-3, 0.8)], "stopped early": [(3e-3, 0.5)]}
    over_scale = panel_figure("augment.crop_scale", RESULTS, sweep)
    assert over_scale["x"] == {"log": False, "categories": ["[0.08, 1.0]", "[0.5, 1.0]"]}
    assert over_scale["series"][0]["x"] == {"augment.crop_scale": [1, 0]}


def test_best_so_far_lasts_until_the_last_trial(sweep: Sweep) -> None:
    stopped = Result(4, "stopped early", 0.1, RESULTS[0].values)
    best = panel_figure("trial", [*RESULTS, stopped], sweep)["series"][0]
    assert (best["name"], best["x"]["trial"], best["y"]) == ("best so far", [0, 2, 4], [0.8, 0.9, 0.9])


def test_sweep_page_is_small_and_self_contained(sweep: Sweep, tmp_path: Path) -> None:
    write_plot(tmp_path / "plot.html", RESULTS, sweep)
    page = (tmp_path / "plot.html").read_text()
    assert len(page) < 100_000
    for text in ("Best val/top1: 0.9000 (trial 2)", "optim.lr", "augment.crop_scale", "failed", "prefers-color-scheme"):
        assert text in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_best_recipe_has_typed_values_of_the_best_trial(sweep: Sweep, tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "try"
    folder.mkdir(parents=True)
    path = write_best(folder, RESULTS[0], sweep, ["schedule.epochs=5"], trials=4)
    config = load_recipe(path)
    assert config.optim.lr == 1e-3
    assert config.optim.weight_decay == 0.01, "a string in the sweep file, a number in the recipe"
    assert config.augment.crop_scale == (0.5, 1.0)
    assert config.schedule.epochs == 5
    assert config.model.embed_dim == 64, "from the base"
    assert f"python launch/train.py {path}" in path.read_text()
