"""Every part that a task names is in FLOPs, memory, plan and MFU."""

from __future__ import annotations

import pytest
from torch import nn

from vit_scale.cost.count import count_model
from vit_scale.cost.hardware import Peak
from vit_scale.cost.meta import build_on_meta
from vit_scale.cost.training import CostPart, StepCost, actual_train_flops_per_image, training_cost
from vit_scale.models import create_model
from vit_scale.recipe import build_config
from vit_scale.report.model_report import report_on
from vit_scale.tasks.classify.classification import Classification

CONFIG = build_config({"model": {"name": "vit_tiny_patch16_224"}, "schedule": {"steps": 4}})
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


def test_mfu_is_executed_flops_over_the_peak_of_all_processes() -> None:
    cost = StepCost({None: 3e9, 24: 1e9}, global_batch=8, processes=2, peak=Peak(1e12, "test"))
    assert cost.mfu(cost.flops(None) + cost.flops(24), seconds=2.0) == pytest.approx(32e9 / 2.0 / 2e12)
    assert StepCost({}, 8, 2, Peak(None, "unknown")).mfu(1.0, 1.0) is None
