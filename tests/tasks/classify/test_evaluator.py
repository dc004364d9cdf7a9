"""Every number of a classification evaluation against its definition, or scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import confusion_matrix, precision_score, recall_score

from vit_scale.tasks.classify.calibration import BINS, Calibration, bin_sums, from_sums
from vit_scale.tasks.classify.evaluator import class_results
from vit_scale.tasks.results import Table

NAMES = ("ant", "bee", "cat", "dog", "eel", "fox")


class Collect:
    """A `Show` that keeps everything."""

    model = torch.nn.Identity()

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.images: dict[str, Callable[[], Image.Image]] = {}
        self.lines: list[str] = []

    def table(self, table: Table) -> None:
        self.tables[table.name] = table

    def image(self, name: str, draw: Callable[[], Image.Image], **_: Any) -> None:
        self.images[name] = draw

    def info(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(50, len(NAMES), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(0, len(NAMES), (50,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("inspect", [False, True])
def test_metrics_count_each_image_once_and_never_padding(logits, labels, evaluate, inspect: bool) -> None:
    evaluator = evaluate(logits, labels, NAMES, inspect=inspect)
    best = logits.topk(5).indices
    assert evaluator.images == 50
    assert evaluator.metrics() == pytest.approx(
        {
            "top1": (logits.argmax(1) == labels).double().mean().item(),
            "top5": (best == labels[:, None]).any(1).double().mean().item(),
            "loss": F.cross_entropy(logits.double(), labels).item(),
        },
        rel=1e-6,
    )


def test_metrics_do_not_depend_on_the_batch_size(logits, labels, evaluate) -> None:
    small, large = (evaluate(logits, labels, NAMES, batch=batch).metrics() for batch in (7, 64))
    assert small == pytest.approx(large, rel=1e-12)


def test_confusion_has_true_classes_in_rows(logits, labels, evaluate) -> None:
    expected = confusion_matrix(labels.numpy(), logits.argmax(1).numpy(), labels=range(len(NAMES)))
    assert np.array_equal(evaluate(logits, labels, NAMES).confusion.matrix().numpy(), expected)


def test_class_results_match_scikit_learn(logits, labels, evaluate) -> None:
    matrix, predicted = evaluate(logits, labels, NAMES).confusion.matrix(), logits.argmax(1)
    recall = recall_score(labels, predicted, average=None, labels=range(6))
    precision = precision_score(labels, predicted, average=None, labels=range(6), zero_division=0)
    rows = class_results(matrix, NAMES)
    assert [row.name for row in rows] == list(NAMES)
    assert [row.recall for row in rows] == pytest.approx(recall.tolist())
    assert [row.precision or 0 for row in rows] == pytest.approx(precision.tolist())
    errors = matrix[0].clone()
    errors[0] = 0
    assert rows[0].mistaken_for == NAMES[int(errors.argmax())]


def test_class_without_images_has_no_recall(logits, labels, evaluate) -> None:
    matrix = evaluate(logits, labels.clamp(max=4), NAMES).confusion.matrix()
    row = class_results(matrix, NAMES)[5]
    assert (row.images, row.recall, row.mistaken_for) == (0, None, None)


def test_report_has_class_table_matrix_figures_and_calibration(logits, labels, evaluate) -> None:
    out = Collect()
    evaluator = evaluate(logits, labels, NAMES)
    numbers = evaluator.report(out)
    assert out.tables["classes"].columns == ["name", "images", "recall", "precision", "mistaken_for"]
    assert sum(row[1] for row in out.tables["classes"].rows) == evaluator.images == 50
    assert out.tables["confusion"].matrix
    assert sum(map(sum, out.tables["confusion"].rows)) == 50
    assert set(out.images) == {"confusion", "reliability", "mistakes"}, "an identity has no attention maps"
    assert numbers["calibration_error"] == evaluator.calibration.error
    assert "ECE, 15 bins" in evaluator.notes()["calibration"]


def test_show_has_confusion_and_misclassified_images(logits, labels, evaluate) -> None:
    out = Collect()
    evaluate(logits, labels, NAMES).show(out)
    assert set(out.tables) == {"confusion"}
    assert set(out.images) == {"mistakes"}, "an identity has no attention maps"
    assert min(out.images["mistakes"]().size) > 100


def test_failing_attention_maps_are_reported_and_do_not_raise(logits, labels, evaluate, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such block\nmore")

    monkeypatch.setattr("vit_scale.tasks.classify.evaluator.attention_maps", fail)
    out = Collect()
    evaluate(logits, labels, NAMES).show(out)
    assert out.lines == ["No attention maps: no such block."]
    assert "confusion" in out.tables


# ------------------------------------------------------------------------------------------------------- calibration


def test_calibration_error_matches_its_definition(logits, labels, evaluate) -> None:
    probability, predicted = logits.softmax(1).max(1)
    expected = 0.0
    for i in range(BINS):
        inside = (probability > i / BINS) & (probability <= (i + 1) / BINS)
        if inside.any():
            gap = (predicted == labels)[inside].double().mean() - probability[inside].double().mean()
            expected += abs(gap.item()) * inside.double().mean().item()
    assert evaluate(logits, labels, NAMES).calibration.error == pytest.approx(expected, abs=1e-6)


def test_probabilities_0_and_1_fall_into_the_outer_bins() -> None:
    sums = bin_sums(torch.tensor([0.0, 0.05, 1.0]), torch.tensor([True, True, False]), torch.ones(3).double())
    assert sums[0].tolist() == [2, *[0] * 13, 1]


@pytest.mark.parametrize(
    ("confidence", "hits", "text"),
    [(90, 90, "well calibrated"), (95, 60, "35.0 points more confident"), (60, 95, "35.0 points less confident")],
)
def test_calibration_note_has_the_direction_of_the_error(confidence: float, hits: float, text: str) -> None:
    note = Calibration([100.0], [confidence], [hits]).note()
    assert text in note
    assert "rough estimate from 100 images" in note


def test_calibration_without_images_has_a_finite_error() -> None:
    assert not math.isnan(from_sums(torch.zeros(3, BINS)).error)


@pytest.mark.parametrize(("classes", "shown"), [(2, False), (5, False), (6, True)])
def test_top5_is_logged_but_not_shown_for_up_to_five_classes(evaluate, classes: int, shown: bool) -> None:
    logits = torch.randn(8, classes, generator=torch.Generator().manual_seed(0))
    evaluator = evaluate(logits, torch.zeros(8, dtype=torch.long), NAMES[:classes], inspect=False)
    assert {metric.name: metric.shown for metric in evaluator.task.metrics} == {
        "top1": True,
        "top5": shown,
        "loss": True,
    }
    assert "top5" in evaluator.metrics()
