"""Photographs and small datasets for the tests of the data pipeline."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.loading.loaders import TrainLoader
from vit_scale.data.sources.table_source import Data, open_data


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Arrow files that `datasets` makes of the tests' images do not go into the user's cache; and no idle waiting."""
    import datasets

    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # Five seconds at the end of each pass over a stream.
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    datasets.disable_progress_bar()


@pytest.fixture(scope="session")
def photographs() -> list[np.ndarray]:
    """Photographs of 224x224 with all kinds of structure, cut from the two that scikit-learn ships."""
    from sklearn.datasets import load_sample_images

    return [
        np.ascontiguousarray(photograph[top : top + 224, left : left + 224])
        for photograph in load_sample_images().images
        for top, left in ((0, 0), (100, 200), (200, 400))
    ]


@pytest.fixture(scope="session")
def encode() -> Callable[..., bytes]:
    """The bytes of an array or Pillow image as a file."""

    def to_bytes(image: np.ndarray | Image.Image, kind: str = "jpeg", **options: Any) -> bytes:
        image = image if isinstance(image, Image.Image) else Image.fromarray(image)
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    return to_bytes


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """30 numbered images in 3 classes: every pixel of image `i` of class `c` has the level 8 * i + c."""
    for label, name in enumerate(("ant", "bee", "cow")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(10):
            pixels = np.full((16, 16, 3), 8 * (10 * label + i) + label, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"


@pytest.fixture
def folder_data(image_folder: Path) -> Data:
    """`image_folder`, opened."""
    return open_data(DataConfig(source=str(image_folder)), seed=0)


@pytest.fixture(scope="session")
def digits() -> Data:
    """The embedded digits."""
    return open_data(DataConfig(), seed=0)


@pytest.fixture
def train_loader() -> Callable[..., TrainLoader]:
    """A TrainLoader with small defaults."""

    def build(source: Any, **changes: Any) -> TrainLoader:
        options: dict[str, Any] = {
            "augment": AugmentConfig(),
            "img_size": (8, 8),
            "in_chans": 1,
            "global_batch": 16,
            "micro_batch": 16,
            "rank": 0,
            "world": 1,
            "seed": 3,
            "workers": 0,
            "end_step": 4,
        }
        return TrainLoader(source, **options | changes)

    return build
