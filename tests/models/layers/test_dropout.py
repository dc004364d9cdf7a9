"""Dropout on a CPU: torch's in distribution, its gradient, and a mask of bytes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from vit_scale.kernels.byte_dropout import draw_kept_elements
from vit_scale.models.layers.dropout import Dropout


def dropped(rate: float, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return dropout of ones."""
    torch.manual_seed(seed)
    return Dropout(rate).train()(torch.ones(shape))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_fraction_of_dropped_elements_equals_the_rate(rate: float) -> None:
    found = dropped(rate, (1000, 1001))
    assert found.unique().tolist() == pytest.approx([0, 1 / (1 - rate)], rel=1e-3)
    share = (found == 0).double().mean().item()
    assert share == pytest.approx(rate, abs=5 * (rate * (1 - rate) / found.numel()) ** 0.5 + 2**-17)
    assert found.double().mean().item() == pytest.approx(1, abs=0.01)


def test_elements_are_dropped_independently_of_their_neighbors() -> None:
    """Four of them are drawn from one random number: all 16 patterns are equally frequent."""
    kept = draw_kept_elements(torch.empty(400_000), 2**15).view(-1, 4).long()
    patterns = (kept * torch.tensor([1, 2, 4, 8])).sum(1).bincount(minlength=16)
    expected = 100_000 / 16
    assert (patterns - expected).abs().max() < 5 * expected**0.5


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3, 5), (0, 4)])
def test_any_number_of_elements_is_supported(shape: tuple[int, ...]) -> None:
    assert dropped(0.5, shape).shape == shape


def test_output_is_determined_by_the_seed() -> None:
    assert torch.equal(dropped(0.3, (50, 50)), dropped(0.3, (50, 50)))
    assert not torch.equal(dropped(0.3, (50, 50)), dropped(0.3, (50, 50), seed=1))


def test_gradient_flows_through_retained_elements_only() -> None:
    x = torch.randn(20, 30, requires_grad=True)
    torch.manual_seed(0)
    found = Dropout(0.4).train()(x * 2)
    factor = (found / (2 * x)).detach()
    weights = torch.randn(20, 30)
    (gradient,) = torch.autograd.grad((found * weights).sum(), x)
    torch.testing.assert_close(gradient, 2 * factor * weights)


def test_shared_gradient_is_not_changed() -> None:
    """As in a residual sum, whose two terms receive the same tensor."""
    x = torch.randn(100, requires_grad=True)
    branch = Dropout(0.5).train()(x * 1)
    (gradient,) = torch.autograd.grad((x + branch).sum(), x)
    torch.testing.assert_close(gradient, 1 + (branch / x).detach())


def test_backward_pass_saves_one_byte_per_element() -> None:
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        Dropout(0.1).train()(torch.ones(1000, requires_grad=True) * 1)
    assert [tensor.nbytes for tensor in saved if tensor.ndim] == [1000]


def test_input_is_not_changed() -> None:
    x = torch.randn(100)
    before = x.clone()
    found = Dropout(0.5).train()(x)
    assert torch.equal(x, before)
    assert (found == 0).any()


def test_dropout_can_be_differentiated_twice() -> None:
    x = torch.randn(50, requires_grad=True)
    torch.manual_seed(0)
    y = Dropout(0.5).train()(x.sin()).square().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    factor = (first / (2 * x.sin() * x.cos())).detach()
    torch.testing.assert_close(second, 2 * factor * (2 * x).cos(), atol=1e-4, rtol=1e-4)


def test_dropout_draws_the_same_numbers_as_torch_if_kernels_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_SCALE_KERNELS", "0")
    found = dropped(0.5, (100,))
    torch.manual_seed(0)
    assert torch.equal(found, F.dropout(torch.ones(100), 0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_output_has_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    found = Dropout(0.25).train()(torch.ones(1000, dtype=dtype))
    assert found.dtype == dtype
    assert set(found.tolist()) <= {0.0, torch.tensor(4 / 3, dtype=dtype).item()}


def test_nothing_is_dropped_in_eval_mode_or_at_rate_zero_and_everything_at_rate_one() -> None:
    x = torch.randn(10)
    for layer in (Dropout(0.5).eval(), Dropout(0.0).train()):
        assert layer(x) is x
    assert torch.equal(Dropout(1.0).train()(x), torch.zeros(10))


def test_compiled_dropout_is_torchs() -> None:
    layer = Dropout(0.5).train()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    found = compiled(torch.ones(100))
    torch.manual_seed(0)
    assert torch.equal(found, F.dropout(torch.ones(100), 0.5))
