"""The first step of a run waits for nothing that it does not need, and pauses are not training time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vit_scale.train import meter as meters
from vit_scale.train.meter import Meter

FIRST_STEP = """
import os, sys
from vit_scale.recipe import load_recipe
from vit_scale.train.run_recipe import run_recipe
from vit_scale.train import loop

def stop(run, batch):
    assert run.state.step == 1
    print("loaded:", *(name for name in ("timm", "wandb", "torch._dynamo") if name in sys.modules), flush=True)
    os._exit(0)

assert callable(loop.after_first_step)
loop.after_first_step = stop
run_recipe(load_recipe("recipes/debug.yaml", sys.argv[1:]), "recipes/debug.yaml")
"""


def test_first_step_waits_for_neither_timm_nor_trackers_nor_the_compiler(root: Path, tmp_path: Path) -> None:
    options = ["track.wandb=offline", "data.workers=0", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP, *options],
        cwd=root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_pauses_are_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 25.0])
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    meter = Meter(SimpleNamespace(device=torch.device("cpu")), since=5.0)  # type: ignore[arg-type]
    with meter.paused():
        pass
    assert meter.since == 20.0


def test_command_starts_a_run_before_torch_is_imported(root: Path) -> None:
    """The check against timm runs in a forked process while torch is imported; after that it would delay the run."""
    code = (
        "import sys; from vit_scale.commands import train; import vit_scale.train.run_recipe as module; "
        "module.run_recipe = lambda *_: print('torch imported:', 'torch' in sys.modules) or 0; "
        "train.main(['recipes/debug.yaml'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "torch imported: False"
