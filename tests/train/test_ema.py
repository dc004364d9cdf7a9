"""The moving average: its value, and the swap for evaluation."""

from __future__ import annotations

import torch
from torch import nn

from vit_scale.train.ema import Ema
from vit_scale.train.schedule import ema_weight


def test_average_follows_the_weights_by_the_schedule() -> None:
    model = nn.Linear(3, 2)
    ema = Ema(model, decay=0.9, warmup=False)
    expected = torch.zeros_like(model.weight)
    for step in range(5):
        with torch.no_grad():
            model.weight.normal_()
        ema.update(step)
        expected += ema_weight(step, 0.9, False) * (model.weight.detach() - expected)
    torch.testing.assert_close(ema.shadow["weight"], expected)


def test_constant_weights_are_their_own_average_from_the_first_step() -> None:
    model = nn.Linear(3, 2)
    ema = Ema(model, decay=0.9999, warmup=True)
    with torch.no_grad():
        model.weight.fill_(7.0)
    ema.update(0)
    assert (ema.shadow["weight"] == 7.0).all()


def test_applied_swaps_and_puts_back_even_on_an_error() -> None:
    model = nn.Linear(3, 2)
    ema = Ema(model, decay=0.5, warmup=False)
    raw = model.weight.detach().clone()
    ema.shadow["weight"] = torch.full_like(raw, 3.0)
    try:
        with ema.applied():
            assert (model.weight == 3.0).all()
            raise RuntimeError
    except RuntimeError:
        pass
    assert torch.equal(model.weight, raw)
    assert (ema.shadow["weight"] == 3.0).all()
