"""Plans on other systems: memory limits, automatic micro-batch sizes, and rejected options."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vit_scale.cost.memory import STRATEGIES
from vit_scale.errors import UserError
from vit_scale.plan.machine import find_machine
from vit_scale.plan.run_plan import RunPlan, make_run_plan
from vit_scale.recipe import build_config

IMAGENET = {"source": "ILSVRC/imagenet-1k"}


def plan(name: str, gpus: int, gpu: str, *, images: int | None = None, **sections: dict[str, Any]) -> RunPlan:
    tree = {"data": IMAGENET, "schedule": {"epochs": 1}, **sections}
    tree["model"] = {"name": name} | sections.get("model", {})
    return make_run_plan(build_config(tree), "recipe.yaml", find_machine(gpus, gpu), images=images)


def test_auto_micro_batch_is_the_largest_divisor_that_fits() -> None:
    run = plan("vit_base_patch16_224", 1, "T4", batch={"global": 1024})
    chosen = run.plan.micro_batch
    assert run.chosen.fits
    assert chosen & (chosen - 1) == 0
    assert chosen * run.plan.accumulation == 1024
    twice = plan("vit_base_patch16_224", 1, "T4", batch={"global": 1024, "micro": 2 * chosen})
    assert not twice.chosen.fits


def test_mixing_requires_even_micro_batches() -> None:
    run = plan("vit_small_patch16_224", 1, "H100", batch={"global": 30}, augment={"mixup": 0.8})
    assert run.plan.micro_batch % 2 == 0


@pytest.mark.parametrize(("augment", "micro"), [({}, 45), ({"mixup": 0.8}, 30)])
def test_micro_batch_on_a_cpu_is_a_multiple_that_the_task_requires(augment: dict, micro: int) -> None:
    recipe = {"model": {"name": "vit_mu"}, "data": IMAGENET, "schedule": {"epochs": 1}, "batch": {"global": 90}}
    cpu = dataclasses.replace(find_machine(1, "H100"), device="cpu")
    run = make_run_plan(build_config({**recipe, "augment": augment}), "recipe.yaml", cpu)
    assert run.plan.micro_batch == micro
    assert run.report.multiple == (2 if augment else 1)


def test_model_that_fits_only_if_sharded_is_reported_per_strategy() -> None:
    run = plan("vit_giant_patch14_224", 8, "V100", batch={"global": 64}, parallel={"strategy": "zero3"})
    fits = {strategy: run.options[strategy].largest_micro_batch is not None for strategy in STRATEGIES}
    assert fits == {"ddp": False, "zero1": True, "zero2": True, "zero3": True}
    assert run.precision == "fp16"


def test_frozen_model_is_planned_as_one() -> None:
    options: dict[str, Any] = {"batch": {"global": 256, "micro": 32}, "ema": {"decay": 0.99}}
    tuned, probed = (
        plan("vit_large_patch16_224", 8, "H100", **options, model={"freeze": freeze}) for freeze in ("none", "all")
    )
    assert probed.report.count.trained_params == 1024 * 1000 + 1000
    assert probed.report.count.params == tuned.report.count.params
    assert probed.cost.flops == pytest.approx(tuned.cost.flops / 3, rel=0.03)
    for strategy in STRATEGIES:
        ours, theirs = (run.options[strategy] for run in (probed, tuned))
        assert ours.footprint.parts["optimizer"] < 0.01 * theirs.footprint.parts["optimizer"]
        assert ours.footprint.parts["activations"] < 0.01 * theirs.footprint.parts["activations"]
        assert ours.communication.sent < (0.35 if strategy == "zero3" else 0.01) * theirs.communication.sent
    assert probed.to_dict()["params_trained"] == 1_025_000


def test_activation_checkpointing_saves_memory_and_adds_flops() -> None:
    options = {"batch": {"global": 256, "micro": 256}}
    plain, full = (
        plan("vit_large_patch16_224", 1, "H100", **options, parallel={"activation_checkpointing": mode})
        for mode in ("none", "full")
    )
    assert full.chosen.footprint.peak < 0.5 * plain.chosen.footprint.peak
    assert plain.cost.flops_per_image < full.cost.flops_per_image < 1.34 * plain.cost.flops_per_image


def test_progressive_resizing_reduces_flops() -> None:
    full = plan("vit_small_patch16_224", 1, "H100", batch={"global": 256})
    small = plan("vit_small_patch16_224", 1, "H100", batch={"global": 256}, model={"img_size": 112})
    mixed = plan(
        "vit_small_patch16_224", 1, "H100", batch={"global": 256}, augment={"progressive": [[0.0, 112], [0.5, 224]]}
    )
    half = (full.cost.flops_per_image + small.cost.flops_per_image) / 2
    assert mixed.cost.flops_per_image == pytest.approx(half, rel=1e-3)


def test_offloading_moves_optimizer_state_to_host_memory() -> None:
    parallel = {"strategy": "zero2"}
    here = plan("vit_base_patch16_224", 8, "A100", parallel=parallel)
    away = plan("vit_base_patch16_224", 8, "A100", parallel=parallel | {"offload": "optimizer"})
    moved = here.chosen.footprint.parts["optimizer"]
    assert away.chosen.footprint.host == moved > 0
    assert away.chosen.footprint.peak == sum(here.chosen.footprint.parts.values()) - moved


@pytest.mark.parametrize(("strategy", "times"), [("ddp", 2), ("zero1", 2), ("zero2", 5), ("zero3", 8)])
def test_accumulation_multiplies_zero2_and_zero3_communication(strategy: str, times: int) -> None:
    run = plan("vit_small_patch16_224", 2, "A100", batch={"global": 64, "micro": 8})
    assert run.plan.accumulation == 4
    assert run.options[strategy].communication.sent == times * 4 * run.report.count.params // 2


def test_single_process_sends_nothing() -> None:
    run = plan("vit_small_patch16_224", 1, "A100")
    assert run.strategy == "single"
    assert all(option.communication.sent == 0 for option in run.options.values())


def test_doubling_gpus_halves_the_time() -> None:
    few, many = (plan("vit_base_patch16_224", gpus, "H100", batch={"global": 1024}) for gpus in (512, 1024))
    assert many.cost.seconds == pytest.approx(few.cost.seconds / 2)
    assert many.cost.device_hours == pytest.approx(few.cost.device_hours)


def test_lamb_is_unsupported_with_zero() -> None:
    run = plan("vit_small_patch16_224", 8, "A100", optim={"name": "lamb"})
    assert [run.options[s].unsupported for s in STRATEGIES] == [None, *["no lamb"] * 3]
    with pytest.raises(UserError, match="optim.name = 'lamb'"):
        plan("vit_small_patch16_224", 8, "A100", optim={"name": "lamb"}, parallel={"strategy": "zero1"})


def test_indivisible_batch_is_rejected() -> None:
    with pytest.raises(UserError, match="not divisible by 3 processes"):
        plan("vit_small_patch16_224", 3, "A100")


def test_source_of_unknown_size_requires_images_flag() -> None:
    with pytest.raises(UserError, match="--images N"):
        plan("vit_small_patch16_224", 1, "A100", data={"source": "my/photos"})
    run = plan("vit_small_patch16_224", 1, "A100", data={"source": "my/photos"}, images=10_240)
    assert run.plan.steps == 10
    sliced = {**IMAGENET, "train_split": "train[:10%]"}
    assert plan("vit_mu", 1, "A100", data=sliced, schedule={"steps": 5}).data.images == 0


def test_known_size_of_digits_matches_the_data() -> None:
    from vit_scale.data.data import open_data

    for fraction in (0.1, 0.2, 0.25):
        data = {"source": "embedded:digits", "val_fraction": fraction}
        run = plan("vit_mu", 1, "T4", data=data, batch={"global": 32})
        config = build_config({"data": data, "schedule": {"steps": 1}})
        opened = open_data(config.data, seed=0)
        assert run.data[:4] == (len(opened.train), opened.num_classes, opened.in_chans, len(opened.val))


@pytest.mark.parametrize(
    ("model", "changes", "milliseconds"),
    [
        ("vit_small_patch16_224", {}, 0.85 + 0.33),
        ("vit_small_patch16_224", {"data": IMAGENET | {"cache": "decoded"}}, 0.33),
        ("vit_small_patch16_224", {"model": {"img_size": 448}}, 0.85 + 4 * 0.33),
        ("vit_cifar_small", {}, 0.05),
    ],
)
def test_cores_for_loading_are_images_per_second_times_cpu_time(
    model: str, changes: dict[str, Any], milliseconds: float
) -> None:
    cost = plan(model, 8, "H100", **changes).cost
    assert cost.images_per_second is not None
    assert cost.loading_cores == pytest.approx(cost.images_per_second / 8 * milliseconds / 1000)
