"""Stochastic depth: skipping is masking in distribution, computes less, and has static shapes on a GPU."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import Tensor

from vit_scale.kernels import accept_hooks
from vit_scale.models import create_model
from vit_scale.models.layers.drop_path import DropPath, drop_path_rates, kept_samples

DRAWS = 4000


def outputs(mode: str, batch: int, rate: float) -> Tensor:
    """Each sample's output in many draws of x + branch(x), with x = 1 and a branch of 3, so 1 or 1 + 3 / (1 - rate)."""
    torch.manual_seed(0)
    layer = DropPath(rate, mode)
    x = torch.ones(batch, 1, 1)
    return torch.stack([layer(x, lambda t: 3 * t).flatten() for _ in range(DRAWS)])


@pytest.mark.parametrize(("batch", "rate"), [(8, 0.25), (7, 0.4), (5, 0.1), (1, 0.3), (64, 0.1)])
def test_skip_equals_mask_in_mean_and_variance(batch: int, rate: float) -> None:
    for mode in ("skip", "mask"):
        found = outputs(mode, batch, rate)
        assert found.unique().tolist() == pytest.approx([1, 1 + 3 / (1 - rate)])
        # Per sample: mean 1 + 3, variance 9 rate / (1 - rate); 4.5 standard errors are allowed.
        variance = 9 * rate / (1 - rate)
        error = 4.5 * (variance / DRAWS) ** 0.5
        torch.testing.assert_close(found.mean(dim=0), torch.full((batch,), 4.0), atol=error, rtol=0)
        torch.testing.assert_close(found.var(dim=0), torch.full((batch,), variance), atol=0.2 * variance, rtol=0)


@pytest.mark.parametrize(("batch", "rate"), [(8, 0.25), (7, 0.4), (1, 0.9), (3, 0.999)])
def test_gpu_computes_the_same_number_of_samples_at_every_step(batch: int, rate: float) -> None:
    """Tested on the meta device, which is treated like a GPU."""
    seen = computed_samples(batch, rate, "meta")
    assert set(seen) == {kept_samples(batch, rate)}
    assert 1 <= seen[0] <= batch
    assert seen[0] < batch * (1 - rate) + 1


@pytest.mark.parametrize(("batch", "rate"), [(8, 0.25), (7, 0.4), (16, 0.1), (3, 0.999)])
def test_cpu_computes_only_the_retained_samples(batch: int, rate: float) -> None:
    torch.manual_seed(0)
    seen = computed_samples(batch, rate, "cpu")
    expected = max(1, batch * (1 - rate))
    assert set(seen) <= {math.floor(expected), math.ceil(expected)}
    assert sum(seen) / len(seen) == pytest.approx(expected, abs=0.15)


def computed_samples(batch: int, rate: float, device: str) -> list[int]:
    """Return the number of samples that the branch receives in each draw."""
    seen: list[int] = []
    layer = DropPath(rate, "skip")
    for _ in range(200):
        layer(torch.randn(batch, 2, 4, device=device), lambda x: seen.append(x.shape[0]) or x.clone())
    return seen


def test_number_of_retained_samples_is_exact_if_possible() -> None:
    assert [kept_samples(10, 0.1), kept_samples(10, 0.7), kept_samples(64, 0.1), kept_samples(1, 0.5)] == [9, 3, 58, 1]


def test_skip_gradient_flows_through_retained_samples_only() -> None:
    """Against the same function written with a mask."""
    torch.manual_seed(0)
    rate, x = 0.4, torch.randn(6, 3, 8, requires_grad=True)
    branch = torch.nn.Linear(8, 8)
    torch.manual_seed(1)
    found = DropPath(rate, "skip")(x, branch)
    kept = (found != x).flatten(1).any(dim=1)
    assert 3 <= int(kept.sum()) <= 4
    expected = x + branch(x) * (kept / (1 - rate))[:, None, None]
    torch.testing.assert_close(found, expected)
    inputs = [x, *branch.parameters()]
    pairs = zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_nothing_is_dropped_in_evaluation_or_at_rate_zero() -> None:
    x = torch.randn(4, 2, 3)
    for layer in (DropPath(0.5).eval(), DropPath(0.0)):
        torch.testing.assert_close(layer(x, torch.sin), x + x.sin())


def test_rates_rise_linearly_or_are_uniform() -> None:
    assert drop_path_rates(0.3, 4, "linear") == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert drop_path_rates(0.3, 3, "uniform") == [0.3] * 3
    assert drop_path_rates(0.3, 1, "linear") == [0.0]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_drops_the_same_samples(mode: str) -> None:
    """With dropout and stochastic depth on, gradients with and without activation checkpointing are bit-identical."""
    gradients = []
    for checkpointing in ("none", mode):
        torch.manual_seed(0)
        model = create_model("vit_mu", drop_path=0.5, drop_path_schedule="uniform", dropout=0.1).train()
        model.set_activation_checkpointing(checkpointing)
        torch.manual_seed(1)
        model(torch.randn(5, 3, 32, 32)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_compiled_blocks_do_not_recompile_from_step_to_step() -> None:
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    model = create_model("vit_mu", depth=3, drop_path=0.4, dropout=0.1).train()
    names = [name for name, _ in model.named_parameters()]
    model.compile_blocks(backend="aot_eager")
    assert [name for name, _ in model.named_parameters()] == names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(10):
        with dynamo.config.patch(error_on_recompile=step > 0):
            model(torch.randn(7, 3, 32, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert not dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("mode", ["skip", "mask"])
def test_compiled_blocks_of_all_drop_rates_share_one_graph(mode: str) -> None:
    """Besides the first block, whose rate is 0, and the last, which computes the class token only."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    model = create_model("vit_mu", depth=10, drop_path=0.8, drop_path_mode=mode).train()
    model.compile_blocks(backend="aot_eager")
    for _ in range(2):
        model(torch.randn(12, 3, 32, 32)).square().mean().backward()
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("options", [{}, {"patch_dropout": 0.5}, {"drop_path_mode": "mask"}], ids=str)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_blocks_equal_plain_ones_with_the_same_draws(options: dict, checkpointing: str) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = create_model("vit_mu", depth=4, drop_path=0.5, **options).train()
        model.set_activation_checkpointing(checkpointing)
        if compiled:
            model.compile_blocks(backend="eager")
        torch.manual_seed(1)
        y = model(torch.randn(6, 3, 32, 32))
        y.square().mean().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_equal_blocks_share_one_compiled_graph_and_the_last_has_a_separate_one() -> None:
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    model = create_model("vit_mu", depth=10).train()
    model.compile_blocks(backend="aot_eager")
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_skip_saves_the_work_it_drops() -> None:
    """Counted in floating-point operations: at rate 0.5 in every block, half of the blocks' work."""
    drop = {"drop_path": 0.5, "drop_path_schedule": "uniform"}
    blocks = block_flops()
    assert block_flops(**drop) == blocks // 2
    assert block_flops(**drop, drop_path_mode="mask") == blocks


def block_flops(**options: object) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = create_model("vit_mu", **options).train()
        images = torch.empty(8, 3, 32, 32)
    with FlopCounterMode(display=False, depth=4) as counter:
        model(images)
    counts = counter.get_flop_counts()
    return sum(sum(counts[f"VisionTransformer.blocks.{i}"].values()) for i in range(model.depth))


@pytest.mark.parametrize("accepted", [True, False])
def test_every_module_runs_and_every_parameter_has_a_gradient_even_if_all_samples_are_dropped(accepted: bool) -> None:
    """DDP and ZeRO-3 require that of every rank at every step, however small its batch."""
    torch.manual_seed(0)
    model = create_model("vit_mu", drop_path=0.9, drop_path_schedule="uniform").train()
    ran: set[str] = set()
    # As a strategy's hooks, which do not prevent shortcuts; the test runs with and without.
    with accept_hooks(model) if accepted else contextlib.nullcontext():
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *_, name=name: ran.add(name))
    everything = {name for name, module in model.named_modules() if not isinstance(module, torch.nn.ModuleList)}
    for _ in range(10):
        ran.clear()
        model.zero_grad()
        model(torch.randn(1, 3, 32, 32)).square().mean().backward()
        assert ran == everything
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("mode", ["skip", "mask"])
def test_half_precision_branch_is_added_in_full_precision(mode: str) -> None:
    """As under autocast, where the residual stream is float32 and a branch returns half precision."""
    x = torch.randn(6, 2, 4)
    y = DropPath(0.5, mode)(x, lambda t: t.half() * 0)
    assert y.dtype == torch.float32
    assert torch.equal(y, x)
