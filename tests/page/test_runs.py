"""Finding runs by folder or recipe, telling them apart, and reading folders of other versions."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vit_scale.errors import UserError
from vit_scale.page.runs import COLORS, distinct_names, find_folders, read_runs
from vit_scale.page.tables import read_confusion


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text("schedule: {steps: 4}")
    return tmp_path


def test_recipe_means_its_newest_run(here: Path, make_run) -> None:
    for age, name in enumerate(["runs/tiny-10", "runs/tiny", "runs/tiny-2", "runs/tiny-other"]):
        config = make_run(name) / "config.yaml"
        os.utime(config, (1e9 - age, 1e9 + (age if name != "runs/tiny-other" else 99)))
    assert find_folders(["tiny.yaml"]) == [Path("runs/tiny-2")]
    os.utime("runs/tiny-10/config.yaml", (2e9, 2e9))
    assert find_folders(["tiny.yaml"]) == [Path("runs/tiny-10")]


def test_recipe_with_its_options_finds_the_given_folder(here: Path, make_run) -> None:
    make_run("elsewhere")
    assert find_folders(["tiny.yaml"], ["run.dir=elsewhere"]) == [Path("elsewhere")]


def test_a_run_may_be_given_by_its_config_or_from_within(here: Path, make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run("runs/a")
    assert find_folders(["runs/a/config.yaml"]) == [Path("runs/a")]
    monkeypatch.chdir("runs/a")
    assert find_folders(["."])[0].name == "a"


def test_the_same_run_twice_is_shown_once(here: Path, make_run) -> None:
    make_run("runs/a")
    assert len(find_folders(["runs/a", "runs/../runs/a", str(here / "runs/a")])) == 1


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("runs", "is not the folder of a run, which has a config.yaml.\nThere are runs/a."),
        ("runs/b", "there is no such run.\nThere are runs/a."),
        ("runs/a/metrics.jsonl", "is not the folder of a run"),
        ("runs/a/nothing", "there is no such run"),
        ("tiny.yaml", "has no run in runs/tiny yet"),
        ("other.yaml", "recipe not found"),
    ],
)
def test_what_is_no_run_is_a_message(here: Path, make_run, argument: str, said: str) -> None:
    make_run("runs/a")
    with pytest.raises(UserError) as error:
        find_folders([argument])
    assert said in str(error.value)


def test_options_without_a_recipe_are_a_message(here: Path, make_run) -> None:
    make_run("runs/a")
    with pytest.raises(UserError, match=r"optim.lr=1: options go with a recipe"):
        find_folders(["runs/a"], ["optim.lr=1"])


def test_runs_of_the_same_name_are_told_apart_by_their_folders(make_run) -> None:
    runs = read_runs([make_run("mon/a"), make_run("tue/a"), make_run("tue/b")])
    assert [run.name for run in runs] == ["mon/a", "tue/a", "tue/b"]
    assert distinct_names([Path("/x/only")]) == ["only"]


def test_each_run_has_its_colour(make_run) -> None:
    runs = read_runs([make_run(str(i), lines=[]) for i in range(len(COLORS) + 1)])
    assert [run.color for run in runs] == [*COLORS, COLORS[0]]


def test_options_of_other_versions_are_shown_and_broken_ones_are_a_message(make_run) -> None:
    folder = make_run()
    (folder / "config.yaml").write_text("optim: {lr: 0.1, from_the_future: 7}\nodd: 3\n")
    assert read_runs([folder])[0].options == {"optim.lr": 0.1, "optim.from_the_future": 7}
    (folder / "config.yaml").write_text("optim: {lr")
    with pytest.raises(UserError, match=r"config.yaml: cannot be read"):
        read_runs([folder])


@pytest.mark.parametrize("broken", ["", "[]", '{"classes": ["a"]}', '{"step": 1, "weights": "raw", "classes": ["a"]'])
def test_broken_confusion_is_left_out(tmp_path: Path, broken: str) -> None:
    (tmp_path / "confusion.json").write_text(broken)
    assert read_confusion(tmp_path / "confusion.json") is None


def test_confusion_counts_must_fit_the_classes(tmp_path: Path) -> None:
    record = {"step": 1, "weights": "raw", "classes": ["a", "b"], "counts": [[1, 2, 3], [4, 5, 6]]}
    (tmp_path / "confusion.json").write_text(json.dumps(record))
    assert read_confusion(tmp_path / "confusion.json") is None


def test_most_frequent_mistakes_come_first(tmp_path: Path) -> None:
    path = tmp_path / "confusion.json"
    record = {"step": 1, "weights": "raw", "classes": ["a", "b", "c"]}
    path.write_text(json.dumps(record | {"counts": [[5, 1, 0], [0, 5, 3], [2, 0, 5]]}))
    assert read_confusion(path).pairs == [("b", "c", 3), ("c", "a", 2), ("a", "b", 1)]
    path.write_text(json.dumps(record | {"pairs": [[0, 2, 4], ["b", "a", 9]]}))
    assert read_confusion(path).pairs == [("b", "a", 9), ("a", "c", 4)]
    assert read_confusion(path).counts == []
