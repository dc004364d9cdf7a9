"""The loss scale of fp16 goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vit_scale.checkpoints.reader import restore
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.strategies.loss_scale import DeepSpeedLossScale, LossScale, TorchLossScale, find_loss_scale
from vit_scale.strategies.shards import Replicated
from vit_scale.train.state import TrainState

OVERFLOWS = [False, False, True, False, False, False, True, True, False, False, False, False, False, False]


def torch_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


def deepspeed_scaler() -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    return DynamicLossScaler(2.0**10, 3, 1, delayed_shift=2, consecutive_hysteresis=False)


@pytest.fixture(autouse=True)
def _first_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's scaler asks for the rank before it reports an overflow."""
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
def test_scales_after_an_interruption_are_those_without(kind: str, interrupted_after: int) -> None:
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


def test_the_scale_moves_between_strategies() -> None:
    scaler = torch_scaler()
    torch_step(scaler, True)
    torch_step(scaler, False)
    other = deepspeed_scaler()
    DeepSpeedLossScale(other).restore(TorchLossScale(scaler).numbers())
    assert other.cur_scale == 2.0**9
    back = torch_scaler()
    TorchLossScale(back).restore(DeepSpeedLossScale(other).numbers())
    assert TorchLossScale(back).numbers() == TorchLossScale(scaler).numbers() == {"scale": 2.0**9, "good_steps": 1}


def test_it_is_found_only_where_losses_are_scaled() -> None:
    class Optimizer:
        loss_scaler = deepspeed_scaler()

    assert find_loss_scale(None, None) is None
    assert find_loss_scale(torch.amp.GradScaler("cpu", enabled=False), None) is None
    assert isinstance(find_loss_scale(torch_scaler(), None), TorchLossScale)
    assert isinstance(find_loss_scale(None, Optimizer()), DeepSpeedLossScale)


def test_a_checkpoint_holds_it(tmp_path: Path) -> None:
    scaler = torch_scaler()
    torch_step(scaler, True)
    folder = CheckpointFolder(tmp_path, keep=1, rank=0, world=1, session="one")
    folder.save(_state(TorchLossScale(scaler)), {"plan": {}})
    folder.close()
    fresh = torch_scaler()
    restore(_state(TorchLossScale(fresh)), tmp_path / "checkpoints/step-00000001")
    assert fresh.get_scale() == 2.0**9
    restore(_state(None), tmp_path / "checkpoints/step-00000001")  # and fp32 may go on from it


def _state(scale: LossScale | None) -> TrainState:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainState(model, model, optimizer, Replicated(model, optimizer, 0, 1), step=1, loss_scale=scale)  # type: ignore[arg-type]
