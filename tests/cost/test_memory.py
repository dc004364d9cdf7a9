"""State memory under each strategy."""

from __future__ import annotations

import pytest
import torch

from vit_scale.cost.memory import STRATEGIES, ZERO3_LIVE, ZERO_BUCKET, States, optimizer_moments, states_by_strategy
from vit_scale.models import create_model

PARAMS, GPUS = 1_000_000, 4


def states(**options: object) -> dict[str, dict[str, int]]:
    return states_by_strategy(States(**{"params": PARAMS, "gpus": GPUS, **options}))


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "optimizer"),
    [("ddp", 6, 4, 8), ("zero1", 6, 4, 16 / 4), ("zero2", 6, 4 / 4, 16 / 4), ("zero3", 4 / 4, 4 / 4, 16 / 4)],
)
def test_bytes_per_parameter_in_half_precision(
    strategy: str, weights: float, gradients: float, optimizer: float
) -> None:
    parts = states()[strategy]
    per_param = [parts[part] / PARAMS for part in ("weights", "gradients", "optimizer", "ema")]
    assert per_param == [weights, gradients, optimizer, 4 / GPUS]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters_have_weights_only(strategy: str) -> None:
    frozen, small = states(params=PARAMS, frozen=PARAMS * 3 // 4)[strategy], states(params=PARAMS // 4)[strategy]
    for part in ("gradients", "optimizer", "ema"):
        assert frozen[part] == small[part]
    weights = {"ddp": 4, "zero1": 4, "zero2": 4, "zero3": 4 / GPUS}[strategy]
    assert frozen["weights"] - small["weights"] == PARAMS * 3 // 4 * weights, "autocast caches trained weights only"


def test_each_zero_stage_needs_less_memory_than_the_previous() -> None:
    sizes = [sum(size for part, size in parts.items() if part != "buffers") for parts in states().values()]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(STRATEGIES)


def test_more_gpus_never_need_more_memory_per_gpu() -> None:
    few, many = states(gpus=2), states(gpus=64)
    assert all(sum(many[strategy].values()) <= sum(few[strategy].values()) for strategy in STRATEGIES)


def test_ddp_needs_no_buckets_besides_the_gradients() -> None:
    assert all(states(gpus=gpus)["ddp"]["buffers"] == 0 for gpus in (1, 2))


def test_two_buckets_overlap_communication() -> None:
    assert states()["zero2"]["buffers"] == 2 * 4 * PARAMS
    assert states(params=4 * PARAMS)["zero2"]["buffers"] == 2 * 4 * PARAMS, "a quarter of the model"
    assert states(params=10**9)["zero2"]["buffers"] == 2 * 4 * ZERO_BUCKET


def test_zero3_gathers_a_limited_part_of_a_large_model() -> None:
    gathered = states(params=10**9, largest_block=10**7)["zero3"]["buffers"] - 3 * 4 * ZERO_BUCKET
    assert gathered == 4 * (ZERO3_LIVE + 10**7)


def test_ema_is_counted_only_if_enabled() -> None:
    assert all(parts["ema"] == 0 for parts in states(ema=False).values())


@pytest.mark.parametrize(("name", "expected"), [("adamw", 2), ("lamb", 2), ("sgd", 1), ("lion", 1)])
def test_optimizer_moments(name: str, expected: int) -> None:
    assert optimizer_moments(name) == expected


def test_sgd_without_momentum_has_no_moments() -> None:
    assert optimizer_moments("sgd", momentum=0.0) == 0


def test_fp32_single_process_equals_torch_allocations() -> None:
    model = create_model("vit_mu")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(1, 3, 32, 32)).sum().backward()
    optimizer.step()
    params = list(model.parameters())
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    parts = states(params=sum(p.numel() for p in params), gpus=1, precision="fp32")["ddp"]
    assert parts["weights"] == sum(p.nbytes for p in params)
    assert parts["gradients"] == sum(p.grad.nbytes for p in params if p.grad is not None)
    assert parts["optimizer"] == sum(t.nbytes for t in moments)
