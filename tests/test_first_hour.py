"""The first hour of a new user: clone, write a recipe for photographs, train, interrupt, resume, use the model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.photographs import CLASSES, write_photographs
from vit_scale.recipe import load_recipe

RECIPE = "recipes/photos.yaml"
SKIPPED = "2 files skipped: 1 .heic (install pillow-heif), 1 not an image"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A clean clone with a folder of photographs, a file that is not an image, and one that cannot be read."""
    clone = tmp_path_factory.mktemp("first") / "vit_scale"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{root}", clone], check=True)
    photos = write_photographs(clone / "photos", per_class=20)
    (photos / "cat/notes.txt").write_text("not an image")
    (photos / "cat/phone.heic").write_bytes(b"not readable without pillow-heif")
    return clone


def run(clone: Path, *words: str, status: int = 0) -> str:
    """Run a command as it is typed in the clone; returns its output."""
    done = subprocess.run(
        [sys.executable, *words], cwd=clone, env=environment(clone), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def environment(clone: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(clone), "WANDB_MODE": "disabled"}


def test_init_writes_a_short_commented_recipe_and_never_overwrites_it(clone: Path) -> None:
    output = run(clone, "-m", "vit_scale", "init", "photos", "--minutes", "0.4")
    assert "126 training and 14 validation images of 7 classes" in output
    assert SKIPPED in output
    assert f"python launch/train.py {RECIPE}" in output, "the next command"
    text = (clone / RECIPE).read_text()
    assert text in output
    assert 10 <= len(text.splitlines()) <= 30
    assert load_recipe(clone / RECIPE).data.source == "photos"
    assert "already exists" in run(clone, "launch/init.py", "photos", status=2)


def test_trial_passes(clone: Path) -> None:
    output = run(clone, "launch/train.py", RECIPE, "--try", "4")
    assert "Trial passed" in output
    assert "bit-identical" in output
    assert not (clone / "runs").exists()


def test_interrupted_training_resumes_and_finishes(clone: Path) -> None:
    metrics = clone / "runs/photos/metrics.jsonl"
    command = [sys.executable, "launch/train.py", RECIPE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=clone, env=environment(clone), start_new_session=True, **pipes)
    try:
        deadline = time.monotonic() + 120
        while not (metrics.exists() and "val/top1" in metrics.read_text()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert SKIPPED in output
    assert "Rerun the same command to resume." in output
    assert "latest" in run(clone, *command[1:], "--list-checkpoints")
    output = run(clone, *command[1:])
    assert "Resuming from" in output
    assert "Finished" in output
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if "train/loss" in line]
    assert steps == sorted(set(steps)), "no step is missing or logged twice"


def test_trained_model_is_evaluated_explained_and_used(clone: Path) -> None:
    output = run(clone, "launch/eval.py", "runs/photos", "--json", "metrics.json")
    assert "Results per class" in output
    top1 = json.loads((clone / "metrics.json").read_text())["top1"]
    assert top1 > 0.5, f"chance is {1 / len(CLASSES):.2f}"
    predictions = json.loads(run(clone, "launch/predict.py", "runs/photos", "photos/rocket", "--json"))
    right = sum(each["predictions"][0]["class"] == "rocket" for each in predictions)
    assert right > len(predictions) / 2
    run(clone, "launch/show_run.py", "runs/photos")
    page = clone / "runs/photos/page.html"
    assert page.stat().st_size < 2e6
    assert "photos" in page.read_text()
