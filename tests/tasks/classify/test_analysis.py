"""Confusions and mistakes, against counts made by hand; and what a whole run shows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix

from vit_scale.recipe import load_recipe
from vit_scale.tasks.classify.analysis import FIXED_IMAGES, MOST_MISTAKES, Inspection
from vit_scale.tasks.classify.confusion import Confusion

LOGGED = {
    "step", "epoch", "images", "train/loss", "train/lr", "train/weight_decay", "train/grad_norm", "train/param_norm",
    "train/update_norm", "train/skipped_steps", "speed/images_per_second", "speed/mfu", "speed/data_wait",
    "memory/process_gb",
}  # fmt: skip


def batches(classes: int, count: int = 3, size: int = 40) -> list[tuple[torch.Tensor, ...]]:
    """(images, logits, labels, real), the last ten of each padding."""
    random = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        images = torch.full((size, 1, 2, 2), number, dtype=torch.uint8)
        images[:, 0, 0, 0] = torch.arange(size)
        labels = torch.randint(classes, (size,), generator=random)
        real = torch.arange(size) < size - 10
        made.append((images, torch.randn(size, classes, generator=random), labels, real))
    return made


def unpadded(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(part[:-10] for part in batch)


def test_confusion_equals_that_of_scikit_learn_without_padding() -> None:
    confusion = Confusion(7)
    for _, logits, labels, real in batches(7):
        confusion.add(labels, logits.argmax(1), real)
    table = confusion.table(3, "raw", list("abcdefg"))
    kept = [unpadded(batch) for batch in batches(7)]
    labels, predicted = torch.cat([b[2] for b in kept]), torch.cat([b[1].argmax(1) for b in kept])
    assert table.counts == confusion_matrix(labels, predicted, labels=range(7)).tolist()


def test_many_classes_have_pairs_of_mistakes_the_most_frequent_first() -> None:
    confusion = Confusion(300)
    labels = torch.tensor([5, 5, 5, 200, 200, 7])
    confusion.add(labels, torch.tensor([6, 6, 6, 201, 201, 7]), torch.ones(6, dtype=torch.bool))
    table = confusion.table(3, "ema", [f"class {i}" for i in range(300)])
    assert table.to_dict().keys() == {"step", "weights", "classes", "pairs"}
    assert table.pairs == [(5, 6, 3), (200, 201, 2)]


def test_mistakes_are_the_wrong_images_of_highest_loss() -> None:
    inspection = Inspection(5)
    losses = []
    for batch in batches(5):
        inspection.add(batch[0], batch[1], batch[2], batch[3])
        _, logits, labels, _ = unpadded(batch)
        wrong = logits.argmax(1) != labels
        losses += torch.nn.functional.cross_entropy(logits, labels, reduction="none")[wrong].tolist()
    mistakes = inspection.mistakes()
    assert [m.loss for m in mistakes] == pytest.approx(sorted(losses, reverse=True)[:MOST_MISTAKES])
    for mistake in mistakes:
        row, number = int(mistake.image[0, 0, 0]), int(mistake.image[0, 1, 1])
        _, logits, labels, _ = batches(5)[number]
        assert mistake.label == labels[row]
        assert mistake.predicted == logits[row].argmax()
        assert mistake.probability == pytest.approx(logits[row].softmax(0).max().item())


def test_fixed_images_are_one_of_each_of_the_first_classes_and_never_padding() -> None:
    inspection = Inspection(20)
    for batch in batches(20):
        inspection.add(batch[0], batch[1], batch[2], batch[3])
    images, labels = inspection.fixed_images()
    assert len(images) == len(set(labels)) == FIXED_IMAGES
    first = batches(20)[0][2].tolist()
    assert labels == list(dict.fromkeys(first))[:FIXED_IMAGES]


def test_images_survive_the_loader_using_its_memory_again() -> None:
    inspection = Inspection(5)
    images, logits, labels, real = batches(5)[0]
    inspection.add(images, logits, labels, real)
    before = [mistake.image.clone() for mistake in inspection.mistakes()]
    images.fill_(255)
    assert all(torch.equal(m.image, image) for m, image in zip(inspection.mistakes(), before, strict=True))


# ------------------------------------------------------------------------------------------------------- a whole run


def test_a_run_logs_and_shows_all_that_is_promised(
    root: Path, tmp_path: Path, fresh_accelerate: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from vit_scale.train.run_recipe import run_recipe

    recipe, run_folder = str(root / "recipes/debug.yaml"), tmp_path
    assert run_recipe(load_recipe(recipe, [f"run.dir={run_folder}", "track.wandb=disabled"]), recipe) == 0
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "train/loss" in line]
    assert all(line.keys() == LOGGED for line in training)
    assert [line["images"] for line in training] == [32 * line["step"] for line in training]
    assert all(line["train/update_norm"] > 0 and math.isfinite(line["train/param_norm"]) for line in training)
    assert training[0]["train/update_norm"] > training[-1]["train/update_norm"], "the learning rate has fallen"
    for name in ("batch", "mistakes", "attention"):
        with Image.open(run_folder / "pictures" / f"{name}.png") as picture:
            assert min(picture.size) > 100
    confusion = json.loads((run_folder / "confusion.json").read_text())
    assert confusion["weights"] == "ema"
    assert confusion["step"] == 12
    counts = torch.tensor(confusion["counts"])
    summary = json.loads((run_folder / "summary.json").read_text())
    assert counts.diagonal().sum() / counts.sum() == pytest.approx(summary["val_ema/top1"])
    assert summary["peak_source"] == "matmul measured at startup"
    assert "matmul measured at startup" in capsys.readouterr().out
