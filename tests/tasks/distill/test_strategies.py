"""Distillation on two processes equals one process, under DDP and under ZeRO-3, where it is interrupted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import vit_scale
from tests.tasks.distill.students import losses, make_teacher, student

TOKENS = {
    "model": {"distilled": True, "pool": "cls"},
    "schedule": {"steps": 4},
    "distill": {"kind": "soft", "temperature": 2.0, "features": [[0, 0], [1, 1]]},
}
CACHED = {
    "schedule": {"steps": 2},
    "augment": {"crop": "none", "interpolation": "bicubic", "mixup": 0.0, "cutmix": 0.0},
    "distill": {"kind": "kl", "cache": True},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, launch_processes: Callable) -> Path:
    """Runs of one process in this one, and of two processes in one launch."""
    top = tmp_path_factory.mktemp("strategies")
    teacher = make_teacher(top / "teacher")
    recipes = {"tokens": student(teacher, **TOKENS), "cached": student(teacher, **CACHED)}
    for name, recipe in recipes.items():
        (top / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
        vit_scale.train(recipe, [f"run.dir={top / name}", f"data.cache_dir={top / 'one'}"])

    def job(name: str, folder: str, strategy: str, **faults: int) -> dict:
        options = [f"run.dir={top / folder}", f"parallel.strategy={strategy}", f"data.cache_dir={top / 'two'}"]
        return {"recipe": str(top / f"{name}.yaml"), "options": [*options, "batch.micro=8"], **faults}

    jobs = [
        job("tokens", "tokens-ddp", "ddp"),
        job("tokens", "tokens-zero3", "zero3", signal_at=2),
        job("tokens", "tokens-zero3", "zero3"),
        job("cached", "cached-ddp", "ddp"),
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    (done,) = launch_processes([*launcher, "tests/workers/train_many.py", json.dumps(jobs)], timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "status 0 1 138" in done.stdout, "interrupted"
    assert "unknown inputs or outputs" not in done.stdout + done.stderr
    return top


@pytest.mark.parametrize("two", ["tokens-ddp", "tokens-zero3", "cached-ddp"])
def test_two_processes_equal_one(runs: Path, two: str) -> None:
    one = two.split("-")[0]
    for ours, theirs in zip(losses(runs / two), losses(runs / one), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    for name in ("model", "model_ema"):
        ours, theirs = (load_file(runs / folder / f"{name}.safetensors") for folder in (two, one))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_logits_of_two_processes_are_those_of_one(runs: Path) -> None:
    (one,), (two,) = (list((runs / name).glob("teacher-*/logits.bin")) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
