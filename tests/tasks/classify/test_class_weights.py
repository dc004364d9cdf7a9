"""Class weights: scikit-learn's, mean 1 over the data, and the same loss for any micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight

from vit_scale.config import Config
from vit_scale.data.batch import DataInfo
from vit_scale.errors import UserError
from vit_scale.recipe import build_config
from vit_scale.schedule import make_plan
from vit_scale.tasks.classify.class_weights import class_weights
from vit_scale.tasks.classify.classification import Classification
from vit_scale.tasks.classify.loss import classification_loss

LABELS = np.repeat([0, 1, 2], [70, 25, 5])
INFO = DataInfo(100, 3, ("ant", "bee", "cow"), (70, 25, 5))


def config(weights: object = "balanced", **data: object) -> Config:
    return build_config({"schedule": {"steps": 1}, "optim": {"class_weights": weights}, "data": data})


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    ours = class_weights(config(), INFO, 3)
    assert ours is not None
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("weights", ["balanced", [3.0, 1.0, 10.0]])
def test_weights_have_mean_1_over_the_images(weights: object) -> None:
    scaled = class_weights(config(weights), INFO, 3)
    assert scaled is not None
    assert scaled[LABELS].mean().item() == pytest.approx(1)
    if weights != "balanced":
        np.testing.assert_allclose(scaled / scaled[0], torch.tensor(weights) / 3, rtol=1e-6)


@pytest.mark.parametrize("info", [INFO, INFO._replace(class_counts=())])
def test_list_has_mean_1_over_classes_if_they_are_equally_frequent(info: DataInfo) -> None:
    scaled = class_weights(config([3.0, 1.0, 11.0], balance=bool(info.class_counts)), info, 3)
    torch.testing.assert_close(scaled, torch.tensor([0.6, 0.2, 2.2]))


def test_header_has_the_range_of_the_weights() -> None:
    options = config()
    task = Classification(options, INFO, make_plan(options, train_images=100, processes=1, device="cpu"))
    assert task.header() == {"class weights": "0.476 to 6.67 (balanced)"}


def test_outputs_without_a_class_have_weight_1() -> None:
    scaled = class_weights(config(), INFO, 5)
    assert scaled is not None
    assert scaled[3:].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("weights", "info", "message"),
    [
        ([1.0, 2.0], INFO, "2 weights for 3 classes"),
        ("balanced", INFO._replace(class_counts=(70, 30, 0)), "class 'cow' has no training images"),
        ("balanced", INFO._replace(class_counts=()), "labels of a stream"),
    ],
)
def test_weights_that_do_not_fit_the_data_are_rejected_before_training(
    weights: object, info: DataInfo, message: str
) -> None:
    options = config(weights)
    Classification(options, info)  # a run is loaded and planned without its data
    with pytest.raises(UserError, match=message):
        Classification(options, info, make_plan(options, train_images=100, processes=1, device="cpu"))


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_weights_must_be_positive(value: float) -> None:
    with pytest.raises(UserError, match=r"optim.class_weights.*greater than 0"):
        config([1.0, value, 1.0])


def test_balancing_twice_is_rejected() -> None:
    with pytest.raises(UserError, match="both even out the classes"):
        config("balanced", balance=True)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, mixed and smoothed targets, weights."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(8, 3, generator=generator),
        torch.rand(8, 3, generator=generator).softmax(1),
        torch.tensor([0.2, 0.8, 5.0]),
    )


def test_cross_entropy_of_soft_targets_is_the_documented_formula() -> None:
    logits, targets, weights = batch()
    loss = classification_loss("cross_entropy", logits, targets, weights)
    torch.testing.assert_close(loss, -(weights * targets * logits.log_softmax(1)).sum(1).mean())


def test_binary_loss_weights_each_image_by_its_target() -> None:
    logits, _, weights = batch()
    mixed = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]]).repeat(4, 1)
    per_image = F.binary_cross_entropy_with_logits(logits, mixed.gt(0).float(), reduction="none").mean(1)
    loss = classification_loss("binary", logits, mixed, weights)
    torch.testing.assert_close(loss, (per_image * (mixed * weights).sum(1)).mean())


@pytest.mark.parametrize("kind", ["cross_entropy", "binary"])
def test_micro_batches_average_to_the_global_batch(kind: str) -> None:
    logits, targets, weights = batch()
    targets = F.one_hot(targets.argmax(1), 3).float()
    whole = classification_loss(kind, logits, targets, weights)
    parts = [classification_loss(kind, x, y, weights) for x, y in zip(logits.split(2), targets.split(2), strict=True)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)
