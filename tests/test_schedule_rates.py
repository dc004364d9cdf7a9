"""Learning rate and EMA coefficient are functions of the step and match their formulas."""

from __future__ import annotations

import math

import pytest

from vit_scale.schedule import LearningRate, ema_weight


def test_warmup_reaches_the_peak_and_cosine_decays_to_final() -> None:
    lr = LearningRate(peak=1.0, final=0.1, steps=110, warmup_steps=10)
    assert [lr.at(s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert lr.at(10) == 1.0
    assert lr.at(60) == pytest.approx(0.55)  # halfway
    assert lr.at(110) == pytest.approx(0.1)
    assert all(lr.at(s) > lr.at(s + 1) >= 0.1 for s in range(10, 110))


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
def test_rate_is_never_negative_nor_above_the_peak(shape: str) -> None:
    lr = LearningRate(peak=2.0, final=0.0, steps=50, warmup_steps=7, shape=shape)
    assert all(0.0 <= lr.at(s) <= 2.0 for s in range(60))


def test_cosine_equals_timm() -> None:
    import torch
    from timm.scheduler import CosineLRScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = CosineLRScheduler(optimizer, t_initial=100, lr_min=0.01, t_in_epochs=False)
    ours = LearningRate(peak=0.5, final=0.01, steps=100, warmup_steps=0)
    for step in range(1, 100):
        theirs.step_update(step)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(ours.at(step), rel=1e-9)


@pytest.mark.parametrize(("decay", "warmup"), [(0.9, False), (0.999, False), (0.9, True), (0.9999, True)])
def test_ema_weight_is_the_bias_corrected_average(decay: float, warmup: bool) -> None:
    """Compare with the textbook form: EMA from zero, divided by one minus the product of the decays."""
    values = [math.sin(t) + 2 for t in range(300)]
    plain, product, folded = 0.0, 1.0, 0.0
    for t, value in enumerate(values):
        decay_now = min(decay, (1 + t) / (10 + t)) if warmup else decay
        plain = decay_now * plain + (1 - decay_now) * value
        product *= decay_now
        folded += ema_weight(t, decay, warmup) * (value - folded)
        assert folded == pytest.approx(plain / (1 - product), rel=1e-9)


def test_first_ema_step_copies_the_weights() -> None:
    assert ema_weight(0, 0.9999, warmup=False) == pytest.approx(1.0)
    assert ema_weight(0, 0.9999, warmup=True) == pytest.approx(1.0)
