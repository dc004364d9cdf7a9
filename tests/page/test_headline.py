"""Headline of the page: numbers, status, options and commands of a run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from vit_scale.format import amount, option_value
from vit_scale.page.headline import best_run, headline, status, timm_line
from vit_scale.page.next_commands import commands
from vit_scale.page.options import changed, differing, option_rows
from vit_scale.page.runs import read_runs
from vit_scale.recipe import flatten, load_recipe


@pytest.mark.parametrize(
    ("count", "text"),
    [(7, "7"), (202_186, "202 k"), (86_567_656, "86.6 M"), (1_012_611_432, "1.01 G"), (17_563_828_224, "17.6 G")],
)
def test_large_numbers_are_abbreviated(count: int, text: str) -> None:
    assert amount(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (3e-4, "0.0003"), ([0.8, 1.0], "[0.8, 1.0]"), ("", '""'), ("cls", "cls")],
)
def test_options_are_formatted_as_on_the_command_line(value: object, text: str) -> None:
    assert option_value(value) == text


def test_headline_has_result_size_time_speed_and_hardware(make_run) -> None:
    summary = {"params": 86_567_656, "macs": 17_563_828_224, "seconds": 4325.0, "processes": 8, "strategy": "zero2"}
    [run] = read_runs([make_run(summary=summary | {"precision": "bf16", "peak_source": "A100 datasheet"})])
    stats = [tuple(part.replace("\xa0", " ") for part in (s.label, s.value, s.detail)) for s in headline(run).values()]
    assert stats == [
        ("Top-1 accuracy", "90.00%", "best, at step 40; last 90.00% (raw), 90.00% (EMA)"),
        ("Parameters", "86.6 M", "17.6 GMACs per image"),
        ("Time", "1h 12m", "40 steps, 2 epochs"),
        ("Images per second", "64", "median; MFU 20.00% (peak: A100 datasheet)"),
        ("Hardware", "8 processes", "ZeRO-2, bf16"),
    ]


def test_time_of_a_resumed_run_includes_earlier_launches(make_run) -> None:
    [run] = read_runs([make_run(summary={"seconds": 1.0})])
    assert headline(run)["time"].value == "20s"


def test_run_without_metrics_has_no_headline(make_run) -> None:
    folder = make_run(lines=[])
    (folder / "summary.json").unlink()
    [run] = read_runs([folder])
    assert headline(run) == {}
    assert timm_line(run) == ""
    assert status(run).startswith("not finished: nothing logged yet, last written ")


def test_run_that_stopped_early_says_so(make_run) -> None:
    [run] = read_runs([make_run(summary={"finished": True, "stopped_early": True}, schedule={"steps": 1000})])
    assert status(run) == "stopped early: step 40/1,000"


def test_frozen_parameters_are_in_the_headline(make_run) -> None:
    [run] = read_runs([make_run(summary={"params": 5_362_762, "params_trained": 21_000, "macs": 365e6})])
    assert headline(run)["parameters"].detail.replace("\xa0", " ") == "21.0 k trained, 365 MMACs per image"


def test_run_in_progress_shows_its_progress(make_run) -> None:
    by_steps, by_epochs = read_runs(
        [
            make_run("a", summary={"finished": False}, schedule={"steps": 1000}),
            make_run("b", summary={"finished": False}, schedule={"epochs": 30}),
        ]
    )
    assert "step 40/1,000" in status(by_steps)
    assert "epoch 2.0/30" in status(by_epochs)


def test_invalid_summary_is_treated_as_empty(make_run) -> None:
    folder = make_run()
    for text in (
        "[1]",
        '{"fini',
        '{"timm_check": 3, "params": "many", "versions": [], "git_commit": 7, "task": 3, "pictures": 4}',
    ):
        (folder / "summary.json").write_text(text)
        [run] = read_runs([folder])
        assert set(headline(run)) == {"best", "time", "images/s"}
        assert timm_line(run) == ""
        assert commands(run)


def test_best_run_is_named(make_run) -> None:
    good = [{"step": 1, "val/top1": 0.5}, {"step": 2, "val/top1": None}]
    runs = read_runs([make_run("a", lines=[]), make_run("b", lines=good), make_run("c", lines=[{"step": 1, "x": 1}])])
    assert best_run(runs) == "Best Top-1 accuracy: 50.00% (b)"
    assert best_run(runs[:1]) == ""


def test_timm_line_has_the_outcome_of_the_check(make_run) -> None:
    check = {"matched": "vit_x", "tensors": 5, "stages": {"head": {}}, "differences": [], "reason": "", "equal": True}
    folder = make_run()

    def line(**found: object) -> str:
        (folder / "summary.json").write_text(json.dumps({"timm_check": check | found}))
        return timm_line(read_runs([folder])[0])

    assert line() == "passed: 5 tensors, 1 stages and MACs match timm's vit_x"
    assert line(differences=["head: 3 and 4"]) == "failed: differs from timm's vit_x: head: 3 and 4"
    assert line(matched=None, reason="rope") == "not applicable: rope"


def test_differing_options_exclude_equal_and_missing_ones(make_run) -> None:
    runs = read_runs([make_run("a", optim={"lr": 0.1}), make_run("b", optim={"lr": 0.2}, run={"dir": "b"})])
    del runs[0].options["ema.decay"]
    rows = option_rows(runs)
    assert [(row.key, row.values, row.default) for row in differing(rows)] == [("optim.lr", ["0.1", "0.2"], "0.001")]
    assert [row.key for row in changed(rows)] == ["optim.lr", "schedule.steps", "batch.global"]
    assert len(rows) >= len(flatten(load_recipe(runs[0].folder / "config.yaml")))


def test_commands_rerun_with_the_same_options_and_resume(make_run) -> None:
    folder = make_run("two words", summary={"finished": False, "processes": 2, "git_commit": "abc-dirty"})
    (folder / "wandb" / "offline-run-1").mkdir(parents=True)
    [run] = read_runs([folder])
    lines = [shlex.split(command.line) for command in commands(run)]
    config = str(folder / "config.yaml")
    train = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "launch/train.py", config]
    assert lines == [
        ["git", "checkout", "abc"],
        [*train, f"run.dir={folder}-again"],
        [*train, f"run.dir={folder}"],
        ["wandb", "sync", str(folder / "wandb" / "offline-run-1")],
        ["python", "launch/show_batch.py", config],
        ["python", "launch/report.py", config],
    ]
    again = flatten(load_recipe(Path(config), lines[1][-1:])) | {"run.dir": None}
    assert again == flatten(load_recipe(Path(config)))
