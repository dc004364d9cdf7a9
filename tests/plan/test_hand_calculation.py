"""Every number of a plan matches a hand calculation: ViT-L/16 on 64 H100."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from vit_scale.plan.machine import find_machine
from vit_scale.plan.run_plan import RunPlan, make_run_plan
from vit_scale.recipe import load_recipe

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "vit_large.yaml"
GPUS = 64
# ViT-L/16 at 224 pixels: 196 patches and a class token, 24 blocks of dimension 1024, 16 heads, MLP of 4096.
TOKENS, WIDTH, HIDDEN, HEADS, BLOCKS = 197, 1024, 4096, 16, 24
PARAMS = 304_326_632 + BLOCKS * 2 * WIDTH  # timm's count plus LayerScale
SHARD = math.ceil(PARAMS / GPUS)
MICRO = 4096 // GPUS
RATES = [0.2 * block / (BLOCKS - 1) for block in range(BLOCKS)]


@pytest.fixture(scope="module")
def run() -> RunPlan:
    return make_run_plan(load_recipe(RECIPE), "recipes/vit_large.yaml", find_machine(GPUS, "H100"))


def test_model_counts_and_timm_check(run: RunPlan) -> None:
    assert run.report.count.params == PARAMS
    assert run.report.count.macs == pytest.approx(61.5547e9, rel=1e-5)
    assert run.timm.equal


def test_steps_epochs_and_warmup(run: RunPlan) -> None:
    assert run.plan.steps == round(200 * 1_281_167 / 4096) == 62_557
    assert run.plan.warmup_steps == math.ceil(20 * 1_281_167 / 4096)
    assert run.plan.epoch(run.plan.steps) == pytest.approx(200, abs=1e-3)


def test_micro_batch_is_the_local_batch(run: RunPlan) -> None:
    plan = run.plan
    assert (plan.processes, plan.accumulation, plan.micro_batch) == (GPUS, 1, MICRO)


def test_learning_rate_warms_up_and_decays_to_zero(run: RunPlan) -> None:
    assert run.lr.at(0) == pytest.approx(1.6e-3 / 6256)
    assert run.lr.at(6256) == 1.6e-3
    assert run.lr.at(62_556) == pytest.approx(0, abs=1e-9)


def block_bytes(rate: float) -> float:
    """Bytes saved per image, in bf16 with an fp32 residual stream, by the images that keep the branch."""
    elements = TOKENS * WIDTH
    norms = 2 * (4 * elements + 8 * TOKENS)
    attention = 2 * 5 * elements + 4 * TOKENS * HEADS
    mlp = 2 * (elements + 2 * TOKENS * HIDDEN)
    layer_scale = 2 * 2 * elements
    return (1 - rate) * (norms + attention + mlp + layer_scale)


def last_block_bytes(rate: float) -> float:
    """All tokens: input before and after the norm, keys and values. Class token only: everything else."""
    all_tokens = (4 + 2 * 3) * TOKENS * WIDTH + 8 * TOKENS
    norm = 4 * WIDTH + 8
    attention = 2 * 2 * WIDTH + 4 * HEADS
    mlp = 2 * (WIDTH + 2 * HIDDEN)
    layer_scale = 2 * 2 * WIDTH
    return (1 - rate) * (all_tokens + norm + attention + mlp + layer_scale)


def test_memory_by_part_under_zero2(run: RunPlan) -> None:
    image = 2 * 3 * 224 * 224
    last_norm = 4 * WIDTH + 8
    activations = image + last_norm + sum(map(block_bytes, RATES[:-1])) + last_block_bytes(RATES[-1])
    parts = dict(run.chosen.footprint.parts)
    assert parts.pop("activations") == pytest.approx(MICRO * activations, rel=1e-6)
    assert parts == {
        "weights": (4 + 2) * PARAMS,
        "gradients": 4 * SHARD,
        "optimizer": (4 + 4 + 8) * SHARD,
        "ema": 4 * SHARD,
        "buffers": 2 * 4 * 50_000_000,
        "context": 2**30,
    }
    gradient_copy = 4 * SHARD
    assert run.chosen.footprint.overlap == gradient_copy, "exists in the optimizer's step only, without activations"
    assert run.chosen.footprint.peak == sum(run.chosen.footprint.parts.values()) - gradient_copy


def test_ddp_keeps_the_memory_of_gradients(run: RunPlan) -> None:
    footprint = run.options["ddp"].footprint
    states = (6 + 4 + 8) * PARAMS + 4 * SHARD
    assert sum(footprint.parts.values()) == states + footprint.parts["activations"] + 2**30
    assert footprint.overlap == 0


def test_one_gpu_counts_the_larger_of_gradients_and_activations() -> None:
    footprint = make_run_plan(load_recipe(RECIPE), RECIPE, find_machine(1, "H100")).options["ddp"].footprint
    micro_batch_saves_more = footprint.parts["activations"] > 4 * PARAMS
    assert micro_batch_saves_more
    assert footprint.overlap == 0, "with accumulation both are needed"


def test_optimizer_without_a_fused_kernel_copies_its_state_in_the_step() -> None:
    config = load_recipe(RECIPE, ["optim.name=lamb", "parallel.strategy=ddp", "batch.global=64"])
    parts = make_run_plan(config, RECIPE, find_machine(GPUS, "H100")).chosen.footprint.parts
    assert parts["activations"] < 12 * PARAMS
    assert parts["undo"] == 12 * PARAMS - parts["activations"]


def test_all_strategies_fit_and_are_supported(run: RunPlan) -> None:
    assert all(option.fits and option.unsupported is None for option in run.options.values())
    assert run.machine.memory == 80e9


@pytest.mark.parametrize(
    ("strategy", "times", "number"), [("ddp", 2, 4), ("zero1", 2, 4), ("zero2", 2, 4), ("zero3", 2, 4)]
)
def test_bytes_sent_per_step(run: RunPlan, strategy: str, times: int, number: int) -> None:
    assert run.options[strategy].communication.sent == pytest.approx(times * 63 / 64 * number * PARAMS, abs=1)


def test_flops_time_and_gpu_hours(run: RunPlan) -> None:
    patches = 196 * 3 * 16 * 16 * WIDTH
    block = TOKENS * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN) + 2 * TOKENS**2 * WIDTH
    fractions = [math.ceil(MICRO * (1 - rate) - 1e-9) / MICRO for rate in RATES]  # rounded up to whole images
    # Keys and values of all tokens; query, projection, attention and MLP of the class token.
    last = TOKENS * 2 * WIDTH**2 + 2 * WIDTH**2 + 2 * TOKENS * WIDTH + 2 * WIDTH * HIDDEN
    macs = 2 * patches + 3 * WIDTH * 1000 + 3 * (block * sum(fractions[:-1]) + last * fractions[-1])
    flops = 2 * macs * 62_557 * 4096
    assert run.cost.flops_per_image == pytest.approx(2 * macs, rel=1e-9)
    assert run.cost.flops == pytest.approx(flops, rel=1e-9)
    assert run.cost.mfu == 0.40
    assert run.cost.seconds == pytest.approx(flops / (GPUS * 989e12 * 0.40), rel=1e-9)
    assert run.cost.device_hours == pytest.approx(GPUS * run.cost.seconds / 3600)
    assert run.cost.images_per_second == pytest.approx(62_557 * 4096 / run.cost.seconds)


def test_deepspeed_config_matches_the_plan(run: RunPlan) -> None:
    settings = run.deepspeed
    assert settings["zero_optimization"]["stage"] == 2
    assert settings["train_batch_size"] == 4096
    assert settings["train_micro_batch_size_per_gpu"] == MICRO
    assert not settings["bf16"]["enabled"], "half precision is autocast around fp32 weights"
