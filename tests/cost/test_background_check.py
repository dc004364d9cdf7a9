"""The check in another process: the same outcome, whatever becomes of that process, and nothing of it is left."""

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
from vit_scale.cost import background_check as check_aside
from vit_scale.cost.background_check import BackgroundCheck
from vit_scale.cost.timm_check import TimmCheck, check_against_timm

MODELS = [
    ModelConfig(name="vit_mu"),
    ModelConfig(name="vit_tiny_patch16_224", num_classes=5),
    ModelConfig(name="vit_mu", pos_embed="rope"),
    ModelConfig(name="timm/resnet18"),
]


def refuse(*_: object) -> TimmCheck:
    raise AssertionError("the check is made in the process that asks")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.name} {model.pos_embed}")
def test_the_outcome_is_that_of_the_check_itself(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = BackgroundCheck(model)
    monkeypatch.setattr(check_aside, "_check", refuse)
    assert aside.result(7, 1) == check_against_timm(model, num_classes=7, in_chans=1)


def test_the_process_that_asks_keeps_its_random_numbers_and_has_no_child_left() -> None:
    before = set(multiprocessing.active_children())
    torch.manual_seed(0)
    random.seed(0)
    drawn, plain = torch.get_rng_state(), random.getstate()
    aside = BackgroundCheck(MODELS[0])
    assert len(set(multiprocessing.active_children()) - before) == 1
    assert aside.result(10, 3).equal
    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == plain
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "silent"])
def test_a_process_that_does_not_answer_is_done_without(end: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_aside, "SECONDS_AT_MOST", 0.01)
    before = set(multiprocessing.active_children())
    aside = BackgroundCheck(MODELS[0])
    (child,) = set(multiprocessing.active_children()) - before
    assert child.pid is not None
    os.kill(child.pid, end)
    assert aside.result(10, 3) == check_against_timm(MODELS[0], num_classes=10, in_chans=3)
    assert not child.is_alive()


def test_where_no_process_can_be_had_the_check_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_processes() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_more_processes)
    assert BackgroundCheck(MODELS[0]).result(10, 3) == check_against_timm(MODELS[0], num_classes=10, in_chans=3)


def test_no_process_is_begun_unless_asked_for() -> None:
    before = set(multiprocessing.active_children())
    check = BackgroundCheck(MODELS[0], aside=False)
    assert set(multiprocessing.active_children()) == before
    assert check.result(10, 3) == check_against_timm(MODELS[0], num_classes=10, in_chans=3)


def test_a_failure_of_the_check_is_told_to_the_one_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_aside, "_check", refuse)
    aside = BackgroundCheck(MODELS[0])
    with pytest.raises(AssertionError, match="the process that asks"):
        aside.result(10, 3)


ASKING = """
import multiprocessing, sys, time
from vit_scale.config import ModelConfig
from vit_scale.cost.background_check import BackgroundCheck

aside = BackgroundCheck(ModelConfig(name="vit_mu"))
assert "torch" not in sys.modules
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(600)
"""


def test_it_ends_when_the_process_that_would_ask_is_gone() -> None:
    asking = subprocess.Popen([sys.executable, "-c", ASKING], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    try:
        other = psutil.Process(int(asking.stdout.readline()))
    finally:
        asking.kill()
        asking.communicate()  # Until both have let go of the pipe.
    assert not psutil.wait_procs([other], timeout=60)[1]
