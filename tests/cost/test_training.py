"""Every part that a task names is in FLOPs, memory, plan and MFU."""

from __future__ import annotations

import pytest
from torch import nn

from vit_scale.cost.count import count_model
from vit_scale.cost.hardware import Peak
from vit_scale.cost.meta import build_on_meta
from vit_scale.cost.training import (
    AttentionSaving,
    CostPart,
    StepCost,
    actual_train_flops_per_image,
    training_cost,
)
from vit_scale.models import create_model
from vit_scale.recipe import build_config
from vit_scale.report.model_report import report_on
from vit_scale.tasks.classify.classification import Classification

CONFIG = build_config({"model": {"name": "vit_tiny_patch16_224"}, "schedule": {"steps": 4}})
KINDS: list[dict] = [{}, {"attention": "window", "window": 2}, {"attention": "linear"}]
TEACHER = build_on_meta(lambda: create_model("vit_small_patch16_224"))


class WithTeacher(Classification):
    def cost_parts(self, model: nn.Module) -> list[CostPart]:
        return [*super().cost_parts(model), CostPart("teacher", TEACHER, backward=False, images=2)]


def test_frozen_part_costs_its_forward_passes() -> None:
    model = build_on_meta(lambda: create_model("vit_tiny_patch16_224"))
    cost = training_cost([CostPart("model", model), CostPart("teacher", TEACHER, backward=False)], CONFIG, batch=None)
    assert cost.flops["teacher"] == 2 * count_model(TEACHER).macs
    assert cost.flops["model"] == actual_train_flops_per_image(count_model(model), CONFIG, None)
    assert cost.total == sum(cost.flops.values())


def test_part_of_the_tokens_costs_less() -> None:
    model = build_on_meta(lambda: create_model("vit_tiny_patch16_224"))
    full, quarter = (training_cost([CostPart("encoder", model, tokens=t)], CONFIG, batch=None).total for t in (1, 0.25))
    assert 0.2 * full < quarter < 0.3 * full


def test_report_asks_the_task() -> None:
    plain, taught = report_on(CONFIG), report_on(CONFIG, task_type=WithTeacher)
    teacher = count_model(TEACHER)
    assert taught.train_flops == plain.train_flops + 2 * teacher.flops
    assert taught.to_dict()["train_flops_per_image_by_part"]["teacher"] == 2 * teacher.flops
    for strategy, parts in taught.memory.items():
        assert parts["frozen"] == 2 * teacher.params, "in bf16 on every device"
        assert taught.memory_total(strategy) == plain.memory_total(strategy) + 2 * teacher.params
    assert taught.count.params == plain.count.params, "a teacher is no parameter of the model"


def saving(**options: object) -> AttentionSaving | None:
    model = {"name": "vit_base_patch16_224", **options}
    return report_on(build_config({"model": model, "schedule": {"steps": 1}})).attention


def test_full_attention_is_not_compared_with_itself() -> None:
    assert saving() is None
    assert saving(name="timm/vit_tiny_patch16_224") is None


def test_report_says_that_linear_attention_saves_nothing_at_197_tokens() -> None:
    found = saving(attention="linear")
    assert found.macs > found.macs_full == 17_563_828_224
    assert "linear at 197 tokens: 18.79 GMACs per image vs. 17.56 with full attention" in found.describe()
    assert "(saves nothing below 535 tokens)" in found.describe()


def test_linear_attention_saves_macs_from_the_reported_number_of_tokens() -> None:
    sizes = {"patch_size": 8, "class_token": False, "pool": "mean", "attention": "linear"}
    wide = {tokens: saving(img_size=(8, 8 * tokens), **sizes) for tokens in (534, 535)}
    assert {found.min_tokens for found in wide.values()} == {535}
    assert wide[534].macs >= wide[534].macs_full
    assert wide[535].macs < wide[535].macs_full


def test_report_says_what_windows_save_at_high_resolution() -> None:
    found = saving(attention="window", window=16, img_size=1024)
    full = report_on(
        build_config({"model": {"name": "vit_base_patch16_224", "img_size": 1024}, "schedule": {"steps": 1}})
    ).count
    assert found.macs_full == full.macs
    assert "window at 4,097 tokens" in found.describe()
    assert f"with full attention (-{round(100 * (1 - found.macs / full.macs))}%)" in found.describe()
    assert found.macs < 0.6 * full.macs


def test_flops_of_training_and_mfu_follow_the_kind_of_attention() -> None:
    models = [build_on_meta(lambda kind=kind: create_model("vit_mu", pool="mean", **kind)) for kind in KINDS]
    full, window, linear = (training_cost([CostPart("model", model)], CONFIG, batch=None).total for model in models)
    matmuls, windows, features = (count_model(model).macs_by_part["attention_matmuls"] for model in models)
    assert full - window == 6 * (matmuls - windows)
    assert 0 < 6 * (features - matmuls) - (linear - full) < 2 * features, "random features have no gradient"


def test_mfu_is_executed_flops_over_the_peak_of_all_processes() -> None:
    cost = StepCost({None: 3e9, 24: 1e9}, global_batch=8, processes=2, peak=Peak(1e12, "test"))
    assert cost.mfu(cost.flops(None) + cost.flops(24), seconds=2.0) == pytest.approx(32e9 / 2.0 / 2e12)
    assert StepCost({}, 8, 2, Peak(None, "unknown")).mfu(1.0, 1.0) is None
