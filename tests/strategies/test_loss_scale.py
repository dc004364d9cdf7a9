"""The loss scale of fp16 resumes where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vit_scale.checkpoints.reader import Checkpoint
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.strategies.loss_scale import (
    DeepSpeedLossScale,
    LossScale,
    TorchLossScale,
    deepspeed_loss_scale,
    torch_loss_scale,
)
from vit_scale.strategies.replicated import PlainEngine
from vit_scale.train.state import TrainState

OVERFLOWS = [False, False, True, False, False, False, True, True, False, False, False, False, False, False]


def torch_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


def deepspeed_scaler() -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    return DynamicLossScaler(2.0**10, 3, 1, delayed_shift=2, consecutive_hysteresis=False)


@pytest.fixture(autouse=True)
def _first_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's scaler queries the rank before it reports an overflow."""
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)


def torch_step(scaler: torch.amp.GradScaler, overflow: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum() * (float("inf") if overflow else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()


def deepspeed_step(scaler: Any, overflow: bool) -> None:
    scaler.update_scale(overflow)


Kind = tuple[Callable[[], Any], Callable[[Any], LossScale], Callable[[Any, bool], None]]
KINDS: dict[str, Kind] = {
    "torch": (torch_scaler, TorchLossScale, torch_step),
    "deepspeed": (deepspeed_scaler, DeepSpeedLossScale, deepspeed_step),
}


@pytest.mark.parametrize("interrupted_after", range(1, len(OVERFLOWS)))
@pytest.mark.parametrize("kind", KINDS)
def test_interruption_does_not_change_the_scale(kind: str, interrupted_after: int) -> None:
    make, view, step = KINDS[kind]
    scaler, scales = make(), []
    for i, overflow in enumerate(OVERFLOWS):
        if i == interrupted_after:
            fresh = make()
            view(fresh).restore(view(scaler).numbers())
        step(scaler, overflow)
        if i >= interrupted_after:
            step(fresh, overflow)
            scales.append(view(scaler).numbers()["scale"])
            assert view(fresh).numbers() == view(scaler).numbers()
    assert interrupted_after > 10 or len(set(scales)) > 1


def test_scale_moves_between_strategies() -> None:
    scaler = torch_scaler()
    torch_step(scaler, True)
    torch_step(scaler, False)
    other = deepspeed_scaler()
    DeepSpeedLossScale(other).restore(TorchLossScale(scaler).numbers())
    assert other.cur_scale == 2.0**9
    back = torch_scaler()
    TorchLossScale(back).restore(DeepSpeedLossScale(other).numbers())
    assert TorchLossScale(back).numbers() == TorchLossScale(scaler).numbers() == {"scale": 2.0**9, "good_steps": 1}


def test_loss_scale_is_found_only_if_losses_are_scaled() -> None:
    class Optimizer:
        loss_scaler = deepspeed_scaler()

    assert torch_loss_scale(None) is None
    assert torch_loss_scale(torch.amp.GradScaler("cpu", enabled=False)) is None
    assert deepspeed_loss_scale(object()) is None
    assert isinstance(torch_loss_scale(torch_scaler()), TorchLossScale)
    assert isinstance(deepspeed_loss_scale(Optimizer()), DeepSpeedLossScale)


def test_checkpoint_contains_the_loss_scale(tmp_path: Path) -> None:
    scaler = torch_scaler()
    torch_step(scaler, True)
    folder = CheckpointFolder(tmp_path, keep=1, rank=0, world=1, session="one")
    folder.save(_state(TorchLossScale(scaler)), {"plan": {}})
    folder.close()
    fresh = torch_scaler()
    checkpoint = Checkpoint(tmp_path / "checkpoints/step-00000001")
    _state(TorchLossScale(fresh)).restore(checkpoint)
    assert fresh.get_scale() == 2.0**9
    resumed_in_fp32 = _state(None)
    resumed_in_fp32.restore(checkpoint)
    assert resumed_in_fp32.step == 1


def _state(scale: LossScale | None) -> TrainState:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PlainEngine(model, optimizer)
    engine.loss_scale = scale
    return TrainState(engine, step=1)
