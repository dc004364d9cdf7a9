"""The background check gives the same result even if its process fails, and leaves no process behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from vit_scale.config import ModelConfig
from vit_scale.cost import background_check
from vit_scale.cost.background_check import BackgroundCheck
from vit_scale.cost.timm_check import TimmCheck, check_against_timm

MODELS = [
    ModelConfig(name="vit_mu"),
    ModelConfig(name="vit_tiny_patch16_224", num_classes=5),
    ModelConfig(name="vit_mu", pos_embed="rope"),
    ModelConfig(name="timm/resnet18"),
]


def fail(*_: object) -> TimmCheck:
    raise AssertionError("the check ran in the parent process")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.name} {model.pos_embed}")
def test_result_equals_a_direct_check(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    check = BackgroundCheck(model)
    monkeypatch.setattr(background_check, "_check", fail)
    assert check.result(7, 1) == check_against_timm(model, num_classes=7, in_chans=1)


def test_parent_rng_is_unchanged_and_no_child_is_left() -> None:
    before = set(multiprocessing.active_children())
    torch.manual_seed(0)
    random.seed(0)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    check = BackgroundCheck(MODELS[0])
    assert len(set(multiprocessing.active_children()) - before) == 1
    assert check.result(10, 3).equal
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_check_runs_in_parent_if_worker_does_not_respond(end: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_check, "TIMEOUT_S", 0.01)
    before = set(multiprocessing.active_children())
    check = BackgroundCheck(MODELS[0])
    (child,) = set(multiprocessing.active_children()) - before
    assert child.pid is not None
    os.kill(child.pid, end)
    assert check.result(10, 3) == check_against_timm(MODELS[0], num_classes=10, in_chans=3)
    assert not child.is_alive()


def test_check_runs_in_parent_if_fork_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_processes() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_more_processes)
    assert BackgroundCheck(MODELS[0]).result(10, 3) == check_against_timm(MODELS[0], num_classes=10, in_chans=3)


def test_no_process_is_started_without_in_background() -> None:
    before = set(multiprocessing.active_children())
    check = BackgroundCheck(MODELS[0], in_background=False)
    assert set(multiprocessing.active_children()) == before
    assert check.result(10, 3) == check_against_timm(MODELS[0], num_classes=10, in_chans=3)


def test_error_in_the_check_is_raised_in_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_check, "_check", fail)
    check = BackgroundCheck(MODELS[0])
    with pytest.raises(AssertionError, match="parent process"):
        check.result(10, 3)


PARENT = """
import multiprocessing, sys, time
from vit_scale.config import ModelConfig
from vit_scale.cost.background_check import BackgroundCheck

check = BackgroundCheck(ModelConfig(name="vit_mu"))
assert "torch" not in sys.modules
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(600)
"""


def test_worker_exits_when_the_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        worker = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.communicate()  # Wait until both have closed the pipe.
    assert not psutil.wait_procs([worker], timeout=60)[1]
