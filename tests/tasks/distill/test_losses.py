"""The losses of distillation equal those of timm.task, with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_scale.data.batch import DataInfo
from vit_scale.recipe import build_config
from vit_scale.tasks.distill.distillation import Distillation
from vit_scale.tasks.distill.features import to_grid
from vit_scale.tasks.distill.losses import feature_loss
from vit_scale.tasks.distill.teacher import TeacherOutput
from vit_scale.tasks.task import Inputs

CLASSES, IMAGES = 7, 5


class Given(nn.Module):
    """A model of timm's interface whose logits are given."""

    num_classes, in_chans = CLASSES, 3
    pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}

    def __init__(self, *logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.ParameterList(logits)

    def set_distilled_training(self, enable: bool = True) -> None:
        """Required by timm."""

    def forward(self, x: Tensor) -> Any:
        return tuple(self.logits) if len(self.logits) > 1 else self.logits[0]


def logits(seed: int) -> Tensor:
    return 3 * torch.randn(IMAGES, CLASSES, generator=torch.Generator().manual_seed(seed))


def ours(student: Any, teacher: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
    config = build_config({"schedule": {"steps": 1}, "distill": {"teacher": "timm/resnet18", **options}})
    task = Distillation(config, DataInfo(0, 3, tuple(map(str, range(CLASSES)))))
    target = F.one_hot(labels, CLASSES).float()
    return task.loss(student, Inputs((), {"target": target, "teacher": TeacherOutput(teacher, [])}))


@pytest.mark.parametrize(("heads", "kind", "temperature"), [(1, "soft", 3.0), (2, "soft", 2.0), (2, "hard", 1.0)])
def test_loss_and_gradients_equal_timm(heads: int, kind: str, temperature: float) -> None:
    from timm.task import LogitDistillationTask, TokenDistillationTask

    student, teacher, labels = Given(*map(logits, range(heads))), logits(9), torch.arange(IMAGES)
    options: dict[str, Any] = {"task_loss_weight": 0.7, "temperature": temperature, "verbose": False}
    if heads == 1:
        theirs = LogitDistillationTask(student, Given(teacher), **options)
    else:
        theirs = TokenDistillationTask(student, Given(teacher), distill_type=kind, **options)
    expected = theirs(torch.zeros(IMAGES, 3, 1, 1), labels)
    expected_grads = torch.autograd.grad(expected["loss"], list(student.logits))
    parts = ours(student(None), teacher, labels, kind=kind, alpha=0.3, temperature=temperature)
    torch.testing.assert_close(parts["loss"], expected["loss"], rtol=0, atol=1e-6)
    torch.testing.assert_close(parts["class"], expected["task_loss"], rtol=0, atol=1e-6)
    grads = torch.autograd.grad(parts["loss"], list(student.logits))
    torch.testing.assert_close(grads, expected_grads, rtol=0, atol=1e-6)


def test_kl_ignores_labels_and_vanishes_for_a_perfect_student() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    parts = [ours(student, teacher, labels, kind="kl") for labels in (torch.arange(IMAGES), torch.zeros(5).long())]
    assert parts[0].keys() == {"loss", "distill"}
    assert parts[0]["loss"] == parts[1]["loss"] > 0.1
    p, q = teacher.softmax(1), student.softmax(1)
    torch.testing.assert_close(parts[0]["loss"], (p * (p / q).log()).sum() / IMAGES, rtol=1e-5, atol=0)
    assert ours(teacher, teacher, torch.arange(IMAGES), kind="kl")["loss"].abs() < 1e-6


def test_temperature_keeps_the_size_of_the_gradient() -> None:
    """Without T^2 it would shrink by T^2."""
    student, teacher = logits(0).requires_grad_(), logits(1)

    def gradient(temperature: float) -> float:
        loss = ours(student, teacher, torch.arange(IMAGES), kind="kl", temperature=temperature)["loss"]
        return torch.autograd.grad(loss, student)[0].norm().item()

    assert gradient(200.0) == pytest.approx(gradient(100.0), rel=0.05)


def test_feature_loss_is_the_error_of_normalized_tokens() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 4, 6), 5 + 9 * torch.randn(2, 3, 4, 6)
    expected = (
        student - (teacher - teacher.mean(-1, True)) / (teacher.var(-1, correction=0, keepdim=True)).sqrt()
    ) ** 2
    torch.testing.assert_close(feature_loss(list(student), list(teacher)), expected.mean(), rtol=1e-4, atol=0)


def test_tokens_are_interpolated_between_grids() -> None:
    rows = torch.arange(4.0).repeat_interleave(4)[None, :, None]  # a ramp from top to bottom on a grid of 4 x 4
    assert torch.equal(to_grid(rows, (4, 4), (4, 4)), rows)
    halved = to_grid(rows, (4, 4), (2, 4))
    assert halved.shape == (1, 8, 1)
    assert halved[0, :4].unique().numel() == 1, "columns are equal"
    assert 0 < halved[0, 0] < 1.5 < halved[0, 4] < 3
