"""Confusions and misclassified images against counts made by hand; and the files of a complete run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import confusion_matrix

from vit_scale.recipe import load_recipe
from vit_scale.tasks.classify.analysis import FIXED_IMAGES, MAX_MISCLASSIFIED, ErrorAnalysis
from vit_scale.tasks.classify.confusion import MAX_PAIRS, Confusion, confusion_table

PADDING = 10
LOGGED = {
    "step", "epoch", "images", "train/loss", "train/lr", "train/weight_decay", "train/grad_norm", "train/param_norm",
    "train/update_norm", "train/skipped_steps", "speed/images_per_second", "speed/mfu", "speed/data_wait",
    "memory/process_gb",
}  # fmt: skip


class Outputs(NamedTuple):
    """A batch, and what a model predicted for it."""

    images: torch.Tensor
    labels: torch.Tensor
    predicted: torch.Tensor
    probability: torch.Tensor
    loss: torch.Tensor
    real: torch.Tensor


def batches(classes: int, count: int = 3, size: int = 40) -> list[Outputs]:
    """The last images of each batch are padding. Pixels identify the image: row first, batch last."""
    random = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        images = torch.full((size, 1, 2, 2), number, dtype=torch.uint8)
        images[:, 0, 0, 0] = torch.arange(size)
        labels = torch.randint(classes, (size,), generator=random)
        logits = torch.randn(size, classes, generator=random)
        probability, predicted = logits.softmax(1).max(1)
        loss = F.cross_entropy(logits, labels, reduction="none")
        made.append(Outputs(images, labels, predicted, probability, loss, torch.arange(size) < size - PADDING))
    return made


def analyze(made: list[Outputs]) -> ErrorAnalysis:
    analysis = ErrorAnalysis()
    for batch in made:
        analysis.add(*batch)
    return analysis


# -------------------------------------------------------------------------------------------------------- confusion


def test_confusion_matches_scikit_learn_without_padding() -> None:
    confusion = Confusion(7)
    for batch in batches(7):
        confusion.add(batch.labels, batch.predicted, batch.real)
    table = confusion_table(confusion, tuple("abcdefg"))
    labels = torch.cat([batch.labels[:-PADDING] for batch in batches(7)])
    predicted = torch.cat([batch.predicted[:-PADDING] for batch in batches(7)])
    assert (table.name, table.matrix, table.columns) == ("confusion", True, list("abcdefg"))
    assert table.rows == confusion_matrix(labels, predicted, labels=range(7)).tolist()


def test_many_classes_give_pairs_sorted_by_count() -> None:
    confusion = Confusion(300)
    labels = torch.tensor([5, 5, 5, 200, 200, 7])
    confusion.add(labels, torch.tensor([6, 6, 6, 201, 201, 7]), torch.ones(6, dtype=torch.bool))
    table = confusion_table(confusion, tuple(f"class {i}" for i in range(300)))
    assert not table.matrix
    assert table.columns == ["true", "predicted", "images"]
    assert table.rows == [["class 5", "class 6", 3], ["class 200", "class 201", 2]]


def test_pairs_are_limited() -> None:
    confusion = Confusion(1000)
    labels = torch.arange(999)
    confusion.add(labels, labels + 1, torch.ones(999, dtype=torch.bool))
    assert len(confusion_table(confusion, tuple(map(str, range(1000)))).rows) == MAX_PAIRS


def test_perfect_predictions_of_many_classes_have_no_pairs() -> None:
    confusion = Confusion(300)
    labels = torch.arange(300)
    confusion.add(labels, labels, torch.ones(300, dtype=torch.bool))
    assert confusion_table(confusion, tuple(map(str, range(300)))).rows == []


# --------------------------------------------------------------------------------------------- misclassified images


def test_worst_are_the_misclassified_images_with_the_highest_loss() -> None:
    made = batches(5)
    found = analyze(made).worst()
    losses = [
        loss
        for batch in made
        for loss, wrong in zip(batch.loss, (batch.predicted != batch.labels) & batch.real, strict=True)
        if wrong
    ]
    assert [each.loss for each in found] == pytest.approx(sorted(map(float, losses), reverse=True)[:MAX_MISCLASSIFIED])
    for each in found:
        row, number = int(each.image[0, 0, 0]), int(each.image[0, 1, 1])
        assert each.label == made[number].labels[row] != each.predicted
        assert each.predicted == made[number].predicted[row]
        assert each.probability == pytest.approx(made[number].probability[row].item())


def test_perfect_predictions_have_no_misclassified_images() -> None:
    made = [batch._replace(predicted=batch.labels) for batch in batches(5)]
    assert analyze(made).worst() == []


def test_fixed_images_are_one_per_class_and_never_padding() -> None:
    images, labels = analyze(batches(20)).fixed_images()
    assert len(images) == len(set(labels)) == FIXED_IMAGES
    first = batches(20)[0].labels.tolist()
    assert labels == list(dict.fromkeys(first))[:FIXED_IMAGES]


def test_rank_with_padding_only_still_has_an_image() -> None:
    """Attention maps under ZeRO-3 require a forward pass on every rank."""
    made = [batch._replace(real=torch.zeros_like(batch.real)) for batch in batches(5)]
    images, labels = analyze(made).fixed_images()
    assert images.shape == (1, 1, 2, 2)
    assert labels == []


def test_images_are_copied_because_the_loader_reuses_its_memory() -> None:
    made = batches(5)[:1]
    analysis = analyze(made)
    before = [each.image.clone() for each in analysis.worst()]
    made[0].images.fill_(255)
    assert before
    assert all(torch.equal(each.image, image) for each, image in zip(analysis.worst(), before, strict=True))


# --------------------------------------------------------------------------------------------------- a complete run


def test_run_writes_metrics_images_tables_and_its_task(
    root: Path, tmp_path: Path, fresh_accelerate: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from vit_scale.train.run_recipe import run_recipe

    recipe = str(root / "recipes/debug.yaml")
    assert run_recipe(load_recipe(recipe, [f"run.dir={tmp_path}", "track.wandb=disabled"]), recipe) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "train/loss" in line]
    skipped = {"train/skipped_steps", "train/bad_steps"}  # new and old name
    assert all(line.keys() - skipped == LOGGED - skipped for line in training)
    assert [line["images"] for line in training] == [32 * line["step"] for line in training]
    assert all(line["train/update_norm"] > 0 and math.isfinite(line["train/param_norm"]) for line in training)
    assert training[0]["train/update_norm"] > training[-1]["train/update_norm"], "the learning rate has decreased"
    summary = json.loads((tmp_path / "summary.json").read_text())
    for name in ("batch", "mistakes", "attention"):
        assert summary["pictures"][name]["title"]
        with Image.open(tmp_path / "pictures" / f"{name}.png") as picture:
            assert min(picture.size) > 100
    assert [metric["name"] for metric in summary["task"]["metrics"]] == ["top1", "top5", "loss"]
    confusion = json.loads((tmp_path / "tables" / "confusion.json").read_text())
    assert (confusion["weights"], confusion["step"], confusion["matrix"]) == ("ema", 12, True)
    counts = torch.tensor(confusion["rows"])
    assert counts.diagonal().sum() / counts.sum() == pytest.approx(summary["val_ema/top1"])
    assert summary["peak_source"] == "matmul measured at startup"
    assert "matmul measured at startup" in capsys.readouterr().out
