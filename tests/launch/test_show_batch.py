"""Image grid of a training batch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit_scale.data.image_grid import caption, draw_grid, to_pictures

Launch = Callable[..., subprocess.CompletedProcess]


def test_writes_a_grid(launch: Launch, tmp_path: Path) -> None:
    out = tmp_path / "batch.png"
    done = launch("launch/show_batch.py", "recipes/digits.yaml", "augment.mixup=0.8", "--out", out, "--count", 9)
    assert done.returncode == 0, done.stderr
    grid = np.asarray(Image.open(out).convert("L"))
    assert grid.shape[1] > 3 * 168
    assert grid.std() > 20, "digits on a white background"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes/none.yaml"], "recipes/none.yaml"),
        (
            ["recipes/digits.yaml", "data.source=/no/such/folder"],
            "data.source=/no/such/folder: ",
        ),
        (["recipes/digits.yaml", "--out", "/no/such/folder/a.png"], "directory /no/such/folder does not exist"),
        (["recipes/digits.yaml", "augment.rand_augment=rand-q5"], "`q5`"),
        (["recipes/digits.yaml", "--step", "-1"], "--step must be at least 0"),
    ],
)
def test_invalid_input_is_reported(arguments: list[str], message: str, launch: Launch, tmp_path: Path) -> None:
    done = launch("launch/show_batch.py", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_captions_show_mixing_coefficients() -> None:
    names = ("cat", "dog", "eel")
    assert caption(torch.tensor([0.0, 1.0, 0.0]), names) == "dog: 1.00"
    assert caption(torch.tensor([0.7, 0.0, 0.3]), names) == "cat: 0.70\neel: 0.30"
    smooth = torch.tensor([0.9, 0.05, 0.05])
    assert caption(smooth, names) == "cat: 0.90", "label smoothing does not add labels"


def test_images_undo_the_normalization() -> None:
    pixels = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    normalized = (pixels / 255 - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    images = to_pictures(normalized, mean, std)
    assert np.array_equal(np.asarray(images[0]), pixels[0].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("count", [1, 5, 16])
def test_grid_shows_every_image(count: int) -> None:
    grid = draw_grid([Image.new("RGB", (200, 100), "red")] * count, ["a"] * count)
    red = (np.asarray(grid) == [255, 0, 0]).all(axis=-1).sum()
    assert red == count * 200 * 100
