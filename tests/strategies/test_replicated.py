"""DDP: what is communicated, and models with running statistics."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vit_scale.recipe import load_recipe
from vit_scale.schedule import make_plan
from vit_scale.strategies.replicated import ddp_options
from vit_scale.strategies.strategy import _make_accelerator
from vit_scale.tasks.evaluate import share_running_statistics


class Mixed(nn.Module):
    """Running statistics, and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)
        self.no_statistics = nn.BatchNorm2d(2, track_running_stats=False)
        self.register_buffer("positions", torch.ones(3))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Rank 1 of two; returns the tensors that it receives from rank 0, whose values are all 7."""
    received: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        received.append(tensor.fill_(7))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    return received


def test_evaluation_uses_the_running_statistics_of_rank_0(group: list[torch.Tensor]) -> None:
    model = Mixed()
    share_running_statistics(model)
    assert len(group) == 3
    assert model.norm.running_mean.eq(7).all()
    assert model.norm.running_var.eq(7).all()
    assert model.norm.num_batches_tracked == 7
    assert model.positions.eq(1).all(), "constants are not sent"


def test_training_does_not_depend_on_running_statistics() -> None:
    """So they need not be sent in each forward pass."""
    gradients = []
    for mean in (0.0, 5.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)).train()
        model[1].running_mean.fill_(mean)
        model(torch.ones(4, 3, 2, 2)).square().sum().backward()
        gradients.append(model[0].weight.grad)
    assert torch.equal(*gradients)


def test_ddp_reduces_gradients_in_place_and_sends_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ddp_options().to_kwargs()
    assert options == {"gradient_as_bucket_view": True, "broadcast_buffers": False}
    made = []
    monkeypatch.setattr("accelerate.Accelerator", lambda **arguments: made.append(arguments))
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load_recipe("recipes/debug.yaml")
    _make_accelerator(config, make_plan(config, train_images=64, processes=2, device="cpu"), "ddp", "fp32")
    assert ddp_options() in made[0]["kwargs_handlers"]
