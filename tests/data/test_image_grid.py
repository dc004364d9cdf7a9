"""Image grids with captions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vit_scale.data.image_grid import caption, draw_grid, to_pil_images
from vit_scale.data.mixing import mix_targets, soft_targets


def test_captions_show_the_mixing_weights() -> None:
    names = ("cat", "dog", "eel")
    assert caption(torch.tensor([0.0, 1.0, 0.0]), names) == "dog"
    assert caption(torch.tensor([0.7, 0.0, 0.3]), names) == "cat: 0.70\neel: 0.30"


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_label_smoothing_is_not_shown_as_mixing(classes: int, smoothing: float) -> None:
    names = [f"c{i}" for i in range(classes)]
    targets = soft_targets(torch.tensor([1, 0]), classes, smoothing)
    assert caption(targets[0], names, smoothing) == "c1"
    mixed = mix_targets(targets, torch.tensor([1, 0]), torch.tensor([0.7, 0.6]))
    assert caption(mixed[0], names, smoothing) == "c1: 0.70\nc0: 0.30"


def test_images_undo_the_normalization() -> None:
    pixels = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    normalized = (pixels / 255 - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    shown = to_pil_images(normalized, mean, std)
    assert np.array_equal(np.asarray(shown[0]), pixels[0].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("count", [1, 5, 16])
def test_grid_shows_all_images(count: int) -> None:
    grid = draw_grid([Image.new("RGB", (200, 100), "red")] * count, ["a"] * count)
    red = (np.asarray(grid) == [255, 0, 0]).all(axis=-1).sum()
    assert red == count * 200 * 100


@pytest.mark.parametrize("size", [(8, 8), (100, 100), (60, 120), (96, 32)])
def test_tiles_fill_their_column_or_are_centered(size: tuple[int, int]) -> None:
    grid = np.asarray(draw_grid([Image.new("RGB", size, "red")] * 4, [""] * 4))
    columns = np.flatnonzero((grid == [255, 0, 0]).all(axis=-1).any(axis=0))
    assert abs(int(columns[0]) - (grid.shape[1] - 1 - int(columns[-1]))) <= 1
    red = (grid == [255, 0, 0]).all(axis=-1)
    assert max(red.any(axis=0).sum() // 2, red.any(axis=1).sum() // 2) == 168


def test_long_captions_stay_within_their_tile() -> None:
    grid = np.asarray(draw_grid([Image.new("RGB", (8, 8), "red")] * 4, ["W" * 60] * 4))
    between = grid.shape[1] // 2
    assert (grid[:, between - 1 : between + 1] == 255).all()
