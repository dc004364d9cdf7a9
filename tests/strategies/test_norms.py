"""Norms of weights and updates, against torch's own arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vit_scale.config import OptimConfig
from vit_scale.models import create_model
from vit_scale.strategies.norms import UpdateWatch, weight_norm
from vit_scale.strategies.replicated import ReplicatedShards
from vit_scale.train.optim.optimizer import build_optimizer

CPU = torch.device("cpu")


def two_layers() -> tuple[nn.Module, ReplicatedShards]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, ReplicatedShards(model, optimizer, rank=0, world=1)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_weight_norm_is_that_of_all_weights_together() -> None:
    model, shards = two_layers()
    assert weight_norm(shards, CPU) == pytest.approx(flat(model).norm().item(), rel=1e-6)


def test_update_norm_is_the_distance_between_weights_before_and_after() -> None:
    model, shards = two_layers()
    watch, before = UpdateWatch(shards, CPU), flat(model)
    model(torch.ones(4, 3)).square().mean().backward()
    shards.torch_optimizer.step()
    weights, change = watch.squares().sqrt().tolist()
    assert weights == pytest.approx(flat(model).norm().item(), rel=1e-6)
    assert change == pytest.approx((flat(model) - before).norm().item(), rel=1e-6)
    assert change > 0


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "muon"])
def test_every_kind_of_optimizer_is_watched(name: str) -> None:
    torch.manual_seed(0)
    model = create_model("vit_mu", img_size=8, patch_size=4, num_classes=2)
    optimizer = build_optimizer(model, OptimConfig(name=name))
    shards = ReplicatedShards(model, optimizer, rank=0, world=1)
    watch, before = UpdateWatch(shards, CPU), flat(model)
    model(torch.ones(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    assert watch.squares()[1].sqrt().item() == pytest.approx((flat(model) - before).norm().item(), rel=1e-5)
    assert not torch.equal(flat(model), before)


def test_skipped_update_has_norm_zero() -> None:
    _, shards = two_layers()
    assert UpdateWatch(shards, CPU).squares()[1] == 0


def test_pieces_of_several_ranks_add_up() -> None:
    model, shards = two_layers()
    pieces = [ReplicatedShards(model, shards.torch_optimizer, rank, world=3) for rank in range(3)]
    squares = sum(UpdateWatch(piece, CPU).squares()[0].item() for piece in pieces)
    assert squares**0.5 == pytest.approx(flat(model).norm().item(), rel=1e-6)


def test_watch_copies_nothing_after_it_was_read() -> None:
    model, shards = two_layers()
    watch = UpdateWatch(shards, CPU)
    watch.squares()
    model(torch.ones(4, 3)).square().mean().backward()
    shards.torch_optimizer.step()
    assert watch._before is None
