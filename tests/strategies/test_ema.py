"""The EMA: its value, and the swap for evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vit_scale.schedule import ema_weight
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.replicated import ReplicatedShards


def make(decay: float, warmup: bool, rank: int = 0, world: int = 1) -> tuple[nn.Linear, Ema]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, Ema(ReplicatedShards(model, optimizer, rank, world), decay, warmup)


def test_ema_follows_the_weights_by_the_schedule() -> None:
    model, ema = make(0.9, warmup=False)
    expected = torch.zeros_like(model.weight)
    for step in range(5):
        with torch.no_grad():
            model.weight.normal_()
        ema.update(step)
        expected += ema_weight(step, 0.9, False) * (model.weight.detach() - expected)
    torch.testing.assert_close(ema.pieces()["weight"].tensor, expected.view(-1))


def test_ema_of_constant_weights_is_exact_from_the_first_step() -> None:
    model, ema = make(0.9999, warmup=True)
    with torch.no_grad():
        model.weight.fill_(7.0)
    ema.update(0)
    assert (ema.pieces()["weight"].tensor == 7.0).all()


def test_applied_restores_the_weights_even_on_an_error() -> None:
    model, ema = make(0.5, warmup=False)
    raw = model.weight.detach().clone()
    ema.pieces()["weight"].tensor.fill_(3.0)

    def use() -> None:
        with ema.applied():
            assert (model.weight == 3.0).all()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        use()
    assert torch.equal(model.weight, raw)
    assert (ema.pieces()["weight"].tensor == 3.0).all()


def test_ranks_own_disjoint_pieces_of_the_full_tensor() -> None:
    for world in (2, 3, 8):
        covered = {"weight": torch.zeros(6), "bias": torch.zeros(2)}
        for rank in range(world):
            for name, piece in make(0.9, True, rank, world)[1].pieces().items():
                covered[name][piece.start : piece.start + piece.tensor.numel()] += 1
        assert all((count == 1).all() for count in covered.values())
