"""Figures are legible for any number of classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit_scale.tasks.classify.calibration import Calibration
from vit_scale.tasks.classify.figures import attention_figure, confusion_figure, reliability_figure, save_figure
from vit_scale.tasks.classify.image_grids import attention_grid


def diagonal(classes: int) -> np.ndarray:
    confusion = np.eye(classes, dtype=np.int64) * 9
    confusion[0, 1] = 7
    return confusion


@pytest.mark.parametrize("classes", [1, 10, 1000])
def test_confusion_matrix_of_any_size_is_legible(classes: int, tmp_path: Path) -> None:
    confusion = diagonal(classes) if classes > 1 else np.array([[5]])
    figure = confusion_figure(confusion, [f"class number {i}" for i in range(classes)], "title")
    save_figure(figure, tmp_path / "c.png")
    width, height = Image.open(tmp_path / "c.png").size
    assert 700 <= height <= width <= 2400
    assert height >= 2 * classes, "a cell is at least two pixels"


def test_few_classes_have_counts_in_cells() -> None:
    texts = {text.get_text() for text in confusion_figure(diagonal(10), list("abcdefghij"), "").axes[0].texts}
    assert texts == {"9", "7"}


def test_worst_errors_of_many_classes_are_labeled() -> None:
    figure = confusion_figure(diagonal(200), [f"c{i}" for i in range(200)], "")
    assert [text.get_text() for text in figure.axes[0].texts] == ["c0 confused with c1, 44%"]


def test_up_to_100_classes_are_labeled() -> None:
    figure = confusion_figure(diagonal(100), [f"c{i}" for i in range(100)], "")
    assert len(figure.axes[0].get_yticklabels()) == 100


def test_reliability_shows_accuracy_per_bin() -> None:
    figure = reliability_figure(Calibration([0, 10], [0, 9], [0, 6]), "title")
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.6]
    assert "30.00%" in figure.axes[0].get_title(loc="left")


@pytest.mark.parametrize("channels", [1, 3])
def test_attention_map_is_drawn_over_the_image(channels: int, tmp_path: Path) -> None:
    pixels = np.zeros((32, 32, channels), np.uint8)
    attention = np.zeros((4, 4))
    attention[0, 3] = 1
    figure = attention_figure(pixels, attention, "seven")
    save_figure(figure, tmp_path / "a.png")
    picture = np.asarray(Image.open(tmp_path / "a.png").convert("L")).astype(float)
    box = figure.axes[1].get_position()
    top, bottom = (round((1 - y) * picture.shape[0]) for y in (box.y1, box.y0))
    left, right = (round(x * picture.shape[1]) for x in (box.x0, box.x1))
    top_right = picture[top + 10 : top + 60, right - 60 : right - 10].mean()
    bottom_left = picture[bottom - 60 : bottom - 10, left + 10 : left + 60].mean()
    assert top_right > bottom_left + 30


def test_attention_map_has_a_scale() -> None:
    attention = np.full((4, 4), 1 / 32)
    attention[0, 3] = 17 / 32
    figure = attention_figure(np.zeros((32, 32, 3), np.uint8), attention, "seven")
    bar = figure.axes[-1]
    assert bar.get_ylabel() == "attention per patch (average 6.25%)"
    assert bar.get_ylim() == pytest.approx((100 / 32, 1700 / 32))


def test_attention_grid_has_a_scale_and_the_range_of_each_map() -> None:
    maps = torch.full((2, 4, 4), 1 / 16)
    maps[0, 0, 0] = 0.5
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    grid = np.asarray(attention_grid(images, maps, [0, 1], ["a", "b"])).astype(int)
    below = grid[-48:]
    colored = (below.max(axis=-1) - below.min(axis=-1) > 20).any(axis=0)
    assert colored.sum() > 100, "a bar of colors below the tiles"
