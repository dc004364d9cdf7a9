"""A task that is passed in Python trains like a built-in one, and needs no other file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import run_script

SCRIPT = "tests/tasks/mean_color.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two processes: one to its end, one that ends after half of its steps and is then extended."""
    top = tmp_path_factory.mktemp("mean_color")
    for name, *options in (["whole"], ["resumed", "schedule.steps=8"], ["resumed"]):
        done = run_script(SCRIPT, top / name, "schedule.shape=constant", *options, processes=2)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "error" in done.stdout
    return top


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_custom_task_learns_on_two_processes(runs: Path) -> None:
    losses = [line["train/loss"] for line in lines(runs / "whole") if "train/loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    summary = json.loads((runs / "whole/summary.json").read_text())
    errors = [line[key] for line in lines(runs / "whole") for key in ("val/error", "val_ema/error") if key in line]
    assert summary["best/val/error"] == min(errors), "lower is better"
    assert summary["task"]["name"] == "mean_color"
    assert summary["class_names"] == []


def test_custom_task_resumes_bit_for_bit(runs: Path) -> None:
    for name in ("model", "model_ema"):
        whole, resumed = (load_file(runs / folder / f"{name}.safetensors") for folder in ("whole", "resumed"))
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    last = {name: lines(runs / name)[-1]["val/error"] for name in ("whole", "resumed")}
    assert last["whole"] == last["resumed"]


def test_run_of_another_task_is_not_resumed(runs: Path) -> None:
    options = ["data.workers=0", "track.wandb=disabled", f"run.resume={runs / 'whole'}", f"run.dir={runs / 'other'}"]
    done = run_script("launch/train.py", "recipes/debug.yaml", *options)
    assert done.returncode == 2
    assert "another task: name = 'mean_color' (existing), 'classify' (requested)" in done.stderr
    assert not (runs / "other").exists()


def test_page_shows_a_custom_task(runs: Path, tmp_path: Path) -> None:
    from vit_scale.page.page import write_page
    from vit_scale.page.runs import read_runs

    write_page(read_runs([runs / "whole"]), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "val/error" in text
    assert "top-1" not in text
