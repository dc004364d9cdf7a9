"""Counting: every figure of an evaluation against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vit_scale.data.batch import Batch
from vit_scale.tasks.classify.calibration import BINS, Calibration, bin_sums, from_sums
from vit_scale.tasks.classify.evaluator import Evaluation, score

NAMES = ("ant", "bee", "cat", "dog", "eel", "fox")


class Lookup(torch.nn.Module):
    """Image i has logits i: the pixel is the number of the row."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits[images.view(-1)]


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(50, len(NAMES), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(0, len(NAMES), (50,), generator=torch.Generator().manual_seed(1))


def run(logits: torch.Tensor, labels: torch.Tensor, relabel: torch.Tensor | None = None, batch: int = 16) -> Evaluation:
    """Score batches with padding at the end, as the loader yields them."""
    batches = []
    for start in range(0, len(labels), batch):
        places = torch.arange(start, start + batch)
        real = places < len(labels)
        indices = places.where(real, 0)
        batches.append(Batch(indices, {"label": labels[indices].where(real, 0)}, places.where(real, -1)))
    cpu = torch.device("cpu")
    return score(Lookup(logits), batches, lambda images: images, class_names=NAMES, device=cpu, relabel=relabel)


def test_accuracy_and_loss_count_each_image_once_and_padding_never(logits: torch.Tensor, labels: torch.Tensor) -> None:
    result = run(logits, labels)
    assert result.images == 50
    assert result.top1 == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    best = logits.topk(5).indices
    assert result.top5 == pytest.approx((best == labels[:, None]).any(1).double().mean().item())
    assert result.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)


def test_confusion_has_true_classes_in_rows(logits: torch.Tensor, labels: torch.Tensor) -> None:
    from sklearn.metrics import confusion_matrix

    expected = confusion_matrix(labels.numpy(), logits.argmax(1).numpy(), labels=range(len(NAMES)))
    assert np.array_equal(run(logits, labels).confusion.numpy(), expected)


def test_classes_have_recall_precision_and_their_worst_confusion(logits: torch.Tensor, labels: torch.Tensor) -> None:
    from sklearn.metrics import precision_score, recall_score

    result, predicted = run(logits, labels), logits.argmax(1)
    recall = recall_score(labels, predicted, average=None, labels=range(6))
    precision = precision_score(labels, predicted, average=None, labels=range(6), zero_division=0)
    rows = result.classes()
    assert [row.name for row in rows] == list(NAMES)
    assert [row.recall for row in rows] == pytest.approx(recall.tolist())
    assert [row.precision or 0 for row in rows] == pytest.approx(precision.tolist())
    wrong = result.confusion[0].clone()
    wrong[0] = 0
    assert rows[0].mistaken_for == NAMES[int(wrong.argmax())]


def test_a_class_without_images_has_no_accuracy(logits: torch.Tensor, labels: torch.Tensor) -> None:
    row = run(logits, labels.clamp(max=4)).classes()[5]
    assert (row.images, row.recall, row.mistaken_for) == (0, None, None)


def test_labels_are_the_models_after_relabelling(logits: torch.Tensor, labels: torch.Tensor) -> None:
    order = torch.tensor([3, 1, 0, 5, 4, 2])
    inverse = order.argsort()
    assert torch.equal(run(logits, inverse[labels], relabel=order).confusion, run(logits, labels).confusion)


def test_calibration_error_is_its_definition(logits: torch.Tensor, labels: torch.Tensor) -> None:
    probability, predicted = logits.softmax(1).max(1)
    expected = 0.0
    for i in range(BINS):
        inside = (probability > i / BINS) & (probability <= (i + 1) / BINS)
        if inside.any():
            gap = (predicted == labels)[inside].double().mean() - probability[inside].double().mean()
            expected += abs(gap.item()) * inside.double().mean().item()
    assert run(logits, labels).calibration.error == pytest.approx(expected, abs=1e-6)


def test_certain_predictions_fall_into_the_last_bin_and_none_is_lost() -> None:
    sums = bin_sums(torch.tensor([0.0, 0.05, 1.0]), torch.tensor([True, True, False]), torch.ones(3).double())
    assert sums[0].tolist() == [2, *[0] * 13, 1]


@pytest.mark.parametrize(
    ("confidence", "hits", "said"),
    [(90, 90, "well calibrated"), (95, 60, "35.0 points more confident"), (60, 95, "35.0 points less confident")],
)
def test_the_note_says_which_way_a_model_errs(confidence: float, hits: float, said: str) -> None:
    calibration = Calibration([100.0], [confidence], [hits])
    assert said in calibration.note()
    assert "rough estimate from 100 images" in calibration.note()


def test_no_images_are_no_error() -> None:
    assert not math.isnan(from_sums(torch.zeros(3, BINS)).error)
