"""Finding runs by directory or recipe, naming them, and reading options of other versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vit_scale.errors import UserError
from vit_scale.page.runs import COLORS, distinct_names, find_folders, read_runs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text("schedule: {steps: 4}")
    return tmp_path


def test_recipe_means_its_latest_run(here: Path, make_run) -> None:
    for age, name in enumerate(["runs/tiny-10", "runs/tiny", "runs/tiny-2", "runs/tiny-other"]):
        config = make_run(name) / "config.yaml"
        os.utime(config, (1e9 - age, 1e9 + (age if name != "runs/tiny-other" else 99)))
    assert find_folders(["tiny.yaml"]) == [Path("runs/tiny-2")]
    os.utime("runs/tiny-10/config.yaml", (2e9, 2e9))
    assert find_folders(["tiny.yaml"]) == [Path("runs/tiny-10")]


def test_recipe_with_run_dir_finds_that_directory(here: Path, make_run) -> None:
    make_run("elsewhere")
    assert find_folders(["tiny.yaml"], ["run.dir=elsewhere"]) == [Path("elsewhere")]


def test_run_may_be_given_as_config_file_or_dot(here: Path, make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run("runs/a")
    assert find_folders(["runs/a/config.yaml"]) == [Path("runs/a")]
    monkeypatch.chdir("runs/a")
    assert find_folders(["."])[0].name == "a"


def test_duplicate_runs_are_shown_once(here: Path, make_run) -> None:
    make_run("runs/a")
    assert len(find_folders(["runs/a", "runs/../runs/a", str(here / "runs/a")])) == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("runs", "not a run directory: no config.yaml.\nRuns: runs/a."),
        ("runs/b", "run not found.\nRuns: runs/a."),
        ("runs/a/metrics.jsonl", "not a run directory"),
        ("runs/a/nothing", "run not found"),
        ("tiny.yaml", "no run in runs/tiny yet"),
        ("other.yaml", "recipe not found"),
    ],
)
def test_missing_run_is_reported(here: Path, make_run, argument: str, message: str) -> None:
    make_run("runs/a")
    with pytest.raises(UserError) as error:
        find_folders([argument])
    assert message in str(error.value)


def test_options_without_a_recipe_are_rejected(here: Path, make_run) -> None:
    make_run("runs/a")
    with pytest.raises(UserError, match=r"optim.lr=1: options require a recipe"):
        find_folders(["runs/a"], ["optim.lr=1"])


def test_runs_of_the_same_name_are_named_with_their_parents(make_run) -> None:
    runs = read_runs([make_run("mon/a"), make_run("tue/a"), make_run("tue/b")])
    assert [run.name for run in runs] == ["mon/a", "tue/a", "tue/b"]
    assert distinct_names([Path("/x/only")]) == ["only"]


def test_each_run_has_a_color(make_run) -> None:
    runs = read_runs([make_run(str(i), lines=[]) for i in range(len(COLORS) + 1)])
    assert [run.color for run in runs] == [*COLORS, COLORS[0]]


def test_options_of_other_versions_are_shown_and_invalid_yaml_is_reported(make_run) -> None:
    folder = make_run()
    (folder / "config.yaml").write_text("optim: {lr: 0.1, from_the_future: 7}\nodd: 3\n")
    assert read_runs([folder])[0].options == {"optim.lr": 0.1, "optim.from_the_future": 7}
    (folder / "config.yaml").write_text("optim: {lr")
    with pytest.raises(UserError, match=r"config.yaml: cannot be read"):
        read_runs([folder])
