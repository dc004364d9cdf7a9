"""Photographs, small datasets and loaders for the tests of the data pipeline."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.augment.transforms import EvalTransform, TrainTransform
from vit_scale.data.data import Data, open_data
from vit_scale.data.loading.loaders import EvalLoader, Loading, TrainLoader
from vit_scale.data.sampling import EvalIndices, TrainIndices
from vit_scale.data.sources.streams import count_images
from vit_scale.data.targets import ClassTarget, Target


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the Arrow files of the tests out of the user's cache, and avoid idle waiting."""
    import datasets

    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # Five seconds at the end of each pass over a stream.
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    datasets.disable_progress_bar()


@pytest.fixture(scope="session")
def photographs() -> list[np.ndarray]:
    """Photographs of 224x224 with all kinds of structure, cropped from the two in scikit-learn."""
    from sklearn.datasets import load_sample_images

    return [
        np.ascontiguousarray(photograph[top : top + 224, left : left + 224])
        for photograph in load_sample_images().images
        for top, left in ((0, 0), (100, 200), (200, 400))
    ]


@pytest.fixture(scope="session")
def encode() -> Callable[..., bytes]:
    """Encode an array or Pillow image as a file."""

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
    """Build a TrainLoader with small defaults."""

    def build(
        source: Any,
        *,
        augment: AugmentConfig | None = None,
        img_size: tuple[int, int] = (8, 8),
        in_chans: int = 1,
        target: Target | None = None,
        on_error: str = "raise",
        workers: int = 0,
        reserved_batches: int | None = None,
        **indices: int,
    ) -> TrainLoader:
        augment = augment or AugmentConfig()
        defaults = {"global_batch": 16, "micro_batch": 16, "seed": 3, "end_step": 4, "repeats": augment.repeats}
        return TrainLoader(
            source,
            TrainTransform(augment, img_size, (0.5,) * in_chans, (0.25,) * in_chans),
            TrainIndices(images=count_images(source), **defaults | indices),
            target or ClassTarget(),
            Loading(in_chans, on_error, workers, reserved_batches),
        )

    return build


@pytest.fixture
def eval_loader() -> Callable[..., EvalLoader]:
    """Build an EvalLoader with small defaults."""

    def build(
        source: Any,
        *,
        augment: AugmentConfig | None = None,
        img_size: tuple[int, int] = (8, 8),
        in_chans: int = 1,
        target: Target | None = None,
        on_error: str = "raise",
        workers: int = 0,
        **indices: int,
    ) -> EvalLoader:
        return EvalLoader(
            source,
            EvalTransform(augment or AugmentConfig(), img_size),
            EvalIndices(images=count_images(source), **{"batch": 32} | indices),
            target or ClassTarget(),
            Loading(in_chans, on_error, workers),
        )

    return build
