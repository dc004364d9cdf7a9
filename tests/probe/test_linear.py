"""Linear probes: as accurate as scikit-learn's logistic regression, selected on training images, deterministic."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from vit_scale.probe.linear import GRID, LinearProbe, Setting, held_out, linear_probe, training_steps

Digits = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def digits() -> Digits:
    """Pixels and labels of scanned digits: 600 for training, 300 to classify. Some pixels are constant."""
    data = load_digits()
    x, y = torch.from_numpy(data.data[:900]).float(), torch.from_numpy(data.target[:900]).long()
    return x[:600], y[:600], x[600:], y[600:]


@pytest.fixture(scope="module")
def probe(digits: Digits) -> LinearProbe:
    x, y, queries, _ = digits
    return linear_probe(x, y, queries, 10, seed=0, steps=300)


def test_as_accurate_as_logistic_regression(digits: Digits, probe: LinearProbe) -> None:
    """At most 2 percentage points below it: 6 of 300 images."""
    x, y, queries, labels = digits
    scaler = StandardScaler().fit(x.numpy())
    model = LogisticRegression(max_iter=500).fit(scaler.transform(x.numpy()), y.numpy())
    expected = model.score(scaler.transform(queries.numpy()), labels.numpy())
    assert expected > 0.85
    assert (probe.predictions == labels).double().mean().item() > expected - 0.02


def test_setting_is_the_best_one_on_held_out_training_images(probe: LinearProbe) -> None:
    assert set(probe.grid) == set(GRID)
    assert probe.held_out == probe.grid[probe.setting] == max(probe.grid.values())
    assert min(probe.grid.values()) < probe.held_out


def test_images_to_classify_do_not_change_the_selection(digits: Digits, probe: LinearProbe) -> None:
    x, y, queries, _ = digits
    again = linear_probe(x, y, queries.flip(0), 10, seed=0, steps=300)
    assert again.grid == probe.grid
    assert torch.equal(again.predictions, probe.predictions.flip(0)), "and the same seed gives the same head"


def test_heads_trained_at_once_equal_heads_trained_alone(digits: Digits) -> None:
    """Also next to one that diverges, which is never selected."""
    x, y, queries, _ = digits
    fit = partial(linear_probe, x, y, queries, 10, seed=1, steps=60)
    settings = [Setting(1e-2, 0.0), Setting(1e-1, 1e-2), Setting(1e30, 1.0)]
    together = fit(settings=settings)
    for setting in settings[:2]:
        assert together.grid[setting] == pytest.approx(fit(settings=[setting]).held_out, abs=0.01)
    assert together.grid[settings[2]] == 0
    assert torch.equal(together.predictions, fit(settings=[together.setting]).predictions)


def test_gradient_step_equals_that_of_torch(digits: Digits) -> None:
    """SGD with momentum, L2 of the weights only and a cosine schedule, on standardized features, of full batches."""
    x, y, queries, _ = digits
    lr, decay, steps = 0.05, 0.01, 20
    ours = linear_probe(x, y, queries, 10, seed=0, steps=steps, settings=[Setting(lr, decay)])
    scaler = StandardScaler().fit(x.numpy())
    inputs, asked = (torch.from_numpy(scaler.transform(part.numpy())).float() for part in (x, queries))
    head = torch.nn.Linear(64, 10)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    groups = [{"params": [head.weight], "weight_decay": decay}, {"params": [head.bias]}]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + np.cos(np.pi * step / steps))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(inputs), y).backward()
        optimizer.step()
    # torch scales the velocity by the rate of each step, as ours does, so predictions agree up to rounding.
    assert (ours.predictions == head(asked).argmax(1)).double().mean() >= 0.99


def test_held_out_images_are_the_same_fraction_of_each_class() -> None:
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)
    mask = held_out(labels, seed=0)
    assert torch.bincount(labels[mask]).tolist() == [10, 6, 4]
    assert torch.equal(mask, held_out(labels, seed=0))
    assert not torch.equal(mask, held_out(labels, seed=1))


def test_training_is_long_enough_for_large_data() -> None:
    assert training_steps(100) == 1000
    assert training_steps(1_281_167) * 1024 >= 20 * 1_281_167
