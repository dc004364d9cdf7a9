"""The options of a trial: the recipe's, shortened to what this system can take."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from vit_scale.errors import UserError
from vit_scale.plan.data_size import DataSize
from vit_scale.recipe import build_config, load_recipe
from vit_scale.tasks.distill.source import find_teacher
from vit_scale.tasks.distill.teacher import load_teacher
from vit_scale.trial import shortened
from vit_scale.trial.measurements import Measurements, real_plan, times
from vit_scale.trial.shortened import (
    check_host_memory,
    images_per_process,
    replace_missing_data,
    replace_missing_teacher,
    shorten,
)

IMAGENET = DataSize(1_281_167, 1000, 3, 50_000)


@pytest.fixture
def large(root):  # type: ignore[no-untyped-def]
    return load_recipe(root / "recipes/vit_large.yaml")


def test_schedule_keeps_its_proportions(large) -> None:  # type: ignore[no-untyped-def]
    plan = real_plan(large, IMAGENET, 1, "cpu")
    short = shorten(large, plan, steps=20, images=2, run_dir="x")
    assert (short.schedule.steps, short.schedule.epochs, short.schedule.warmup_steps) == (20, None, 2 + 1)
    assert short.schedule.warmup_epochs is None
    assert short.batch.global_ == 2
    assert short.track.wandb == "disabled"
    assert (short.optim, short.model, short.ema) == (large.optim, large.model, large.ema)


def test_schedule_of_unknown_length_keeps_its_proportions_too() -> None:
    config = build_config({"schedule": {"epochs": 10, "warmup_epochs": 5}, "data": {"source": "my/photos"}})
    plan = real_plan(config, DataSize(0, 10, 3), 1, "cpu")
    assert plan.steps == 0
    assert shorten(config, plan, steps=20, images=2, run_dir="x").schedule.warmup_steps == 10


def test_batch_on_a_cpu_is_smaller_for_larger_models(large) -> None:  # type: ignore[no-untyped-def]
    small = build_config({"model": {"name": "vit_mu"}, "schedule": {"epochs": 1}, "batch": {"global": 4096}})
    images = {}
    for name, config in (("large", large), ("small", small)):
        images[name] = images_per_process(config, real_plan(config, IMAGENET, 1, "cpu"), device="cpu")
    assert images == {"large": 2, "small": 64}  # MixUp needs pairs


def test_batch_on_gpus_is_at_most_what_the_recipe_has(large) -> None:  # type: ignore[no-untyped-def]
    for world in (1, 8, 64):
        plan = real_plan(large, IMAGENET, world, "cuda")
        images = images_per_process(large, plan, device="cuda")
        assert images == min(shortened.GPU_BATCH, 4096 // world)


def test_synthetic_images_have_the_shape_of_the_missing_ones(large) -> None:  # type: ignore[no-untyped-def]
    config, size, note = replace_missing_data(large)
    assert size.images == 1_281_167
    assert note is not None
    assert note.startswith("synthetic images instead of ILSVRC/imagenet-1k (")
    data = config.data
    assert (data.source, data.synthetic_classes, data.synthetic_chans, data.synthetic_size) == (
        "synthetic",
        1000,
        3,
        256,
    )


def test_data_on_this_system_are_used() -> None:
    config = build_config({"schedule": {"steps": 5}})
    same, size, note = replace_missing_data(config)
    assert (same, note) == (config, None)
    assert (size.images, size.val_images, size.found) == (1617, 180, "counted")


def test_missing_teacher_is_replaced_by_random_weights_of_its_model(tmp_path: Path) -> None:
    recipe = {"schedule": {"steps": 5}, "distill": {"teacher": "timm/test_vit.r160_in1k", "kind": "soft"}}
    config = build_config(recipe)
    replaced, note = replace_missing_teacher(config, tmp_path)
    assert note == "random instead of timm/test_vit.r160_in1k, which is not on this system"
    assert replaced.distill.kind == "soft"
    source = find_teacher(replaced, num_classes=1000, in_chans=3)
    assert source.model == find_teacher(config, num_classes=1000, in_chans=3).model
    assert load_teacher(source, source.normalization).sha256
    alone = build_config({"schedule": {"steps": 5}})
    assert replace_missing_teacher(alone, tmp_path) == (alone, None)


def test_model_without_enough_memory_is_rejected_before_it_is_built(
    large,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    class Memory:
        available = 2**30

    monkeypatch.setattr(shortened.psutil, "virtual_memory", Memory)
    with pytest.raises(UserError, match=r"vit_large_patch16_224 needs about .* GiB of host memory"):
        check_host_memory(large, 1)


def test_time_of_the_whole_run_has_one_optimizer_step_per_global_batch(large) -> None:  # type: ignore[no-untyped-def]
    plan = real_plan(large, IMAGENET, 1, "cpu")
    measured = Measurements(large, large, plan, IMAGENET, {})
    measured.trial_plan = real_plan(
        build_config({"schedule": {"steps": 9}, "batch": {"global": 2}}), IMAGENET, 1, "cpu"
    )
    measured.step_seconds, measured.wait_seconds, measured.pass_seconds = 5.0, 1.0, 3.0
    assert measured.accumulation == 2048
    assert measured.real_step_seconds == 1.0 + 2048 * (3.0 + 1.0)
    measured.eval_batch_seconds = 2.0
    assert measured.eval_seconds == times(plan.eval_every, plan.steps) * 2 * 782 * 2.0  # raw and EMA weights


@pytest.mark.parametrize(
    ("every", "steps", "count"), [(1000, 1500, 2), (1000, 12, 1), ("auto", 3000, 10), ("auto", 4, 4)]
)
def test_evaluations_are_counted(every: object, steps: int, count: int) -> None:
    assert times(every, steps) == count


def test_time_of_evaluations_respects_their_cap(large) -> None:  # type: ignore[no-untyped-def]
    plan = real_plan(large, IMAGENET, 1, "cpu")
    capped = dataclasses.replace(large, run=dataclasses.replace(large.run, eval_images=2000))
    seconds = []
    for config in (large, capped):
        measured = Measurements(config, config, plan, IMAGENET, {}, trial_plan=plan, eval_batch_seconds=1.0)
        seconds.append(measured.eval_seconds)
    batches = [math.ceil(images / plan.eval_batch) for images in (50_000, 2000)]
    assert seconds[0] / seconds[1] == pytest.approx(batches[0] / batches[1])
