"""Image grid of a training batch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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
            "data.source=/no/such/folder: directory not found",
        ),
        (["recipes/digits.yaml", "--out", "/no/such/folder/a.png"], "directory /no/such/folder does not exist"),
        (["recipes/digits.yaml", "augment.rand_augment=rand-q5"], "invalid section `q5`"),
        (["recipes/digits.yaml", "--step", "-1"], "--step must be at least 0"),
    ],
)
def test_invalid_input_is_reported(arguments: list[str], message: str, launch: Launch, tmp_path: Path) -> None:
    done = launch("launch/show_batch.py", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
