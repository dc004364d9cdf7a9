"""Residual sums in place: the values, gradients and draws of DropPath, with less memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from vit_scale.kernels.residual import add_branch_
from vit_scale.models.layers.drop_path import DropPath

MODES = [(0.0, "skip"), (0.4, "skip"), (0.4, "mask")]


def values_and_gradients(function: object, layer: DropPath, training: bool) -> list[Tensor]:
    torch.manual_seed(0)
    branch = nn.Linear(8, 8)
    leaf = torch.randn(6, 3, 8, requires_grad=True)
    torch.manual_seed(1)
    y = function(layer.train(training), leaf * 1, branch)
    return [y, *torch.autograd.grad(y.square().sum(), [leaf, *branch.parameters()])]


@pytest.mark.parametrize(("rate", "mode"), MODES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("overwrite_x", [True, False])
def test_values_gradients_and_draws_equal_those_of_the_module(
    rate: float, mode: str, training: bool, overwrite_x: bool
) -> None:
    layer = DropPath(rate, mode)
    expected = values_and_gradients(lambda layer, x, branch: layer(x, branch), layer, training)
    found = values_and_gradients(partial(add_branch_, overwrite_x=overwrite_x), layer, training)
    for ours, plain in zip(found, expected, strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize(("rate", "mode"), MODES)
def test_branch_may_return_only_leading_tokens(rate: float, mode: str) -> None:
    layer, x = DropPath(rate, mode).train(), torch.randn(6, 3, 8)
    torch.manual_seed(1)
    expected = layer(x, torch.sin)[:, :2]
    torch.manual_seed(1)
    torch.testing.assert_close(add_branch_(layer, x, lambda x: x[:, :2].sin()), expected)


def test_sum_overwrites_only_the_output_of_the_branch() -> None:
    x, outputs = torch.randn(4, 3, 8), []
    before = x.clone()
    found = add_branch_(DropPath(0.0).train(), x, lambda x: outputs.append(x.sin()) or outputs[0])
    assert found is outputs[0]
    assert torch.equal(x, before)
    torch.testing.assert_close(found, x + x.sin())


def test_stochastic_depth_overwrites_x_only_on_request() -> None:
    for overwrite_x in (False, True):
        x = torch.randn(8, 3, 8)
        before = x.clone()
        found = add_branch_(DropPath(0.5).train(), x, torch.sin, overwrite_x=overwrite_x)
        assert (found.data_ptr() == x.data_ptr()) == overwrite_x
        assert torch.equal(x, before) != overwrite_x


def test_output_of_a_branch_is_not_saved_for_the_backward_pass() -> None:
    """Nor is anything else of its size: only the indices of the computed samples."""
    x = torch.randn(8, 16, 32, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        add_branch_(DropPath(0.5, "skip").train(), x, lambda t: t + 1)
    assert sum(saved) <= 2 * 8


def test_half_precision_branch_is_added_in_full_precision() -> None:
    """As under autocast, where the residual stream is float32 and a branch returns half precision."""
    x = torch.randn(6, 2, 4)
    for rate in (0.0, 0.5):
        y = add_branch_(DropPath(rate).train(), x, lambda t: t.half() * 0)
        assert y.dtype == torch.float32
        assert torch.equal(y, x)
