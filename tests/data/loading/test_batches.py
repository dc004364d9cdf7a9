"""Training batches: images processed in groups equal images processed one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from vit_scale.config import AugmentConfig
from vit_scale.data.augment.transforms import TrainTransform
from vit_scale.data.batch import Sample
from vit_scale.data.draws import uniforms
from vit_scale.data.images.decode import open_image
from vit_scale.data.loading import batches
from vit_scale.data.loading.batches import Reader, TrainBatches, WorkerBatch
from vit_scale.data.targets import ClassTarget
from vit_scale.errors import UserError

EVERYTHING = AugmentConfig(
    rand_augment="rand-m9-mstd0.5-inc1", erase=0.5, color_jitter=0.3, three_augment=True, interpolation="random"
)


@dataclass
class Images:
    """A source that reads from a list; labels are the indices."""

    stored: list[Any]
    name = "list"

    def __len__(self) -> int:
        return len(self.stored)

    def read(self, index: int) -> Sample:
        return Sample(self.stored[index], index)

    def describe(self, index: int) -> str:
        return f"image {index}"

    @property
    def labels(self) -> np.ndarray:
        return np.arange(len(self.stored))


@pytest.fixture
def files(photographs: list[np.ndarray], encode: Callable[..., bytes]) -> list[bytes]:
    """Small and large files of two formats, alternating."""
    sizes = [(32, 32), (224, 200), (20, 40), (64, 64)]
    return [encode(photographs[i % 6][:h, :w], "jpeg" if i % 3 else "png") for i, (h, w) in enumerate(4 * sizes)]


def training(stored: list[Any], on_error: str = "raise", size: int = 32) -> TrainBatches:
    transform = TrainTransform(EVERYTHING, (size, size), (0.5,) * 3, (0.25,) * 3)
    reader = Reader(transform, ClassTarget(), 3, on_error)
    return TrainBatches(Images(stored), reader, transform, 5, reader.ring(0, len(stored)))


def build(training: TrainBatches) -> WorkerBatch:
    indices = np.arange(len(training.source))
    return training.build(0, (100 + indices, indices))


def check_images(batch: WorkerBatch, train: TrainBatches, files: list[bytes]) -> None:
    """Assert that each image of the batch equals its file transformed alone."""
    rows = uniforms(5, 100 + np.arange(len(files)), train.transform.slots).tolist()
    for image, file, row in zip(batch.to_batch().images.numpy(), files, rows, strict=True):
        assert np.array_equal(image, train.transform(open_image(file, 3), row))


@pytest.mark.parametrize("at_a_time", [1, 5000, 10**9])
def test_group_size_does_not_change_images(at_a_time: int, files: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_OPEN_PIXELS", at_a_time)
    train = training(files)
    batch = build(train)
    check_images(batch, train, files)
    assert batch.target["label"].tolist() == list(range(len(files)))


def max_open_images(train: TrainBatches, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the most images that were open and not yet cropped while a batch was built."""
    waiting, most = 0, 0

    def count_open(data: Any, channels: int) -> Any:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        return open_image(data, channels)

    def count_crop(image: Any, geometry: Any) -> Any:
        nonlocal waiting
        waiting -= 1
        return TrainTransform.crop(train.transform, image, geometry)

    monkeypatch.setattr(batches, "open_image", count_open)
    monkeypatch.setattr(train.transform, "crop", count_crop)
    build(train)
    return most


def test_small_images_are_opened_in_groups_and_large_ones_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_open_images(training([np.zeros((32, 32, 3), np.uint8)] * 40), monkeypatch) == 40
    assert max_open_images(training([np.zeros((600, 500, 3), np.uint8)] * 8), monkeypatch) == 1
    assert max_open_images(training([np.zeros((32, 32, 3), np.uint8)] * 4, size=512), monkeypatch) == 1


@pytest.fixture
def corrupt(files: list[bytes]) -> list[bytes]:
    """Return `files` with two that cannot be opened, and one that can be opened but not decoded."""
    large = next(i for i, file in enumerate(files) if len(file) > 5000 and file[:2] == b"\xff\xd8")
    files[2], files[3] = b"no image", files[3][:50]
    files[large] = files[large][: len(files[large]) // 3]
    return files


def test_next_image_replaces_an_unreadable_one(corrupt: list[bytes]) -> None:
    train = training(corrupt, on_error="skip")
    batch = build(train)
    unreadable = {problem.number for problem in batch.problems}
    assert len(unreadable) == 3
    assert {2, 3} < unreadable
    expected = [next(j for j in range(i, len(corrupt)) if j not in unreadable) for i in range(len(corrupt))]
    assert batch.target["label"].tolist() == expected
    check_images(batch, train, [corrupt[i] for i in expected])


def test_first_unreadable_image_is_named(corrupt: list[bytes]) -> None:
    with pytest.raises(UserError, match="image [0-9]+: cannot be decoded: .*data.on_error=skip"):
        build(training(corrupt))
