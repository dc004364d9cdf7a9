"""The training-step benchmark compares only models that compute the same."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def train_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "benchmarks")
    return importlib.import_module("train_step")


@pytest.mark.parametrize("schedule", ["linear", "uniform"])
def test_both_sides_are_the_same_model(train_step: ModuleType, schedule: str) -> None:
    ours, theirs = train_step.build("vit_mu", 0.4, schedule, "cpu")
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    train_step.check_same(ours, theirs, images, labels)
    assert ours.training
    assert theirs.training
    assert all(parameter.grad is None for model in (ours, theirs) for parameter in model.parameters())
    their_rates = [getattr(block.drop_path1, "drop_prob", 0) for block in theirs.blocks]
    assert [block.drop_path1.rate for block in ours.blocks] == pytest.approx(their_rates)


def test_different_gradient_is_detected(train_step: ModuleType) -> None:
    ours, theirs = train_step.build("vit_mu", 0.0, "linear", "cpu")
    theirs.norm.bias.register_hook(lambda gradient: gradient + 0.01)
    with pytest.raises(AssertionError, match=r"norm\.bias"):
        train_step.check_same(ours, theirs, torch.randn(4, 3, 32, 32), torch.arange(4))
