"""Image grids with captions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vit_scale.data.image_grid import caption, draw_grid, to_pil_images


def test_captions_show_the_mixing_weights() -> None:
    names = ("cat", "dog", "eel")
    assert caption(torch.tensor([0.0, 1.0, 0.0]), names) == "dog: 1.00"
    assert caption(torch.tensor([0.7, 0.0, 0.3]), names) == "cat: 0.70\neel: 0.30"
    smooth = torch.tensor([0.9, 0.05, 0.05])
    assert caption(smooth, names) == "cat: 0.90", "smoothing is not a second label"


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
