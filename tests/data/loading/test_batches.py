"""Training batches: many images go through each step together, and come out as one by one."""

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
from vit_scale.data.images.decode import open_picture
from vit_scale.data.loading import batches
from vit_scale.data.loading.batches import Made, Reader, TrainBatches
from vit_scale.data.loading.slots import SlotRing
from vit_scale.errors import UserError

EVERYTHING = AugmentConfig(
    rand_augment="rand-m9-mstd0.5-inc1", erase=0.5, color_jitter=0.3, three_augment=True, interpolation="random"
)


@dataclass
class Images:
    """A source of what is in a list; labels are the places in it."""

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
    """Small and large files of two kinds, in turn."""
    sizes = [(32, 32), (224, 200), (20, 40), (64, 64)]
    return [encode(photographs[i % 6][:h, :w], "jpeg" if i % 3 else "png") for i, (h, w) in enumerate(4 * sizes)]


def training(stored: list[Any], on_error: str = "raise", size: int = 32) -> TrainBatches:
    transform = TrainTransform(EVERYTHING, (size, size), (0.5,) * 3, (0.25,) * 3)
    return TrainBatches(Images(stored), Reader(3, on_error), transform, 5, SlotRing(0, (len(stored), 3, size, size)))


def make(training: TrainBatches) -> Made:
    places = np.arange(len(training.source))
    return training.make(0, (100 + places, places))


def check_images(made: Made, train: TrainBatches, files: list[bytes]) -> None:
    """Assert that each image of the batch is what becomes of its file alone."""
    rows = uniforms(5, 100 + np.arange(len(files)), train.transform.slots).tolist()
    for image, file, row in zip(made.take_images().numpy(), files, rows, strict=True):
        assert np.array_equal(image, train.transform(open_picture(file, 3), row))


@pytest.mark.parametrize("at_a_time", [1, 5000, 10**9])
def test_images_are_the_same_however_many_are_opened_at_a_time(
    at_a_time: int, files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_PIXELS_AT_A_TIME", at_a_time)
    train = training(files)
    made = make(train)
    check_images(made, train, files)
    assert made.labels.tolist() == list(range(len(files)))


def opened_at_most(train: TrainBatches, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most images that were open and not yet cropped while a batch was made."""
    waiting, most = 0, 0

    def count_open(data: Any, channels: int) -> Any:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        return open_picture(data, channels)

    def count_crop(picture: Any, row: list[float]) -> Any:
        nonlocal waiting
        waiting -= 1
        return TrainTransform.crop(train.transform, picture, row)

    monkeypatch.setattr(batches, "open_picture", count_open)
    monkeypatch.setattr(train.transform, "crop", count_crop)
    make(train)
    return most


def test_small_images_are_opened_together_and_large_ones_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened_at_most(training([np.zeros((32, 32, 3), np.uint8)] * 40), monkeypatch) == 40
    assert opened_at_most(training([np.zeros((600, 500, 3), np.uint8)] * 8), monkeypatch) == 1
    assert opened_at_most(training([np.zeros((32, 32, 3), np.uint8)] * 4, size=512), monkeypatch) == 1


@pytest.fixture
def damaged(files: list[bytes]) -> list[bytes]:
    """`files` with two that cannot be opened, and one that can be opened but not decoded."""
    large = next(i for i, file in enumerate(files) if len(file) > 5000 and file[:2] == b"\xff\xd8")
    files[2], files[3] = b"no image", files[3][:50]
    files[large] = files[large][: len(files[large]) // 3]
    return files


def test_the_next_image_takes_the_place_of_a_broken_one(damaged: list[bytes]) -> None:
    train = training(damaged, on_error="skip")
    made = make(train)
    broken = {problem.number for problem in made.problems}
    assert len(broken) == 3
    assert {2, 3} < broken
    expected = [next(j for j in range(i, len(damaged)) if j not in broken) for i in range(len(damaged))]
    assert made.labels.tolist() == expected
    check_images(made, train, [damaged[i] for i in expected])


def test_the_first_broken_image_is_named(damaged: list[bytes]) -> None:
    with pytest.raises(UserError, match="image [0-9]+: cannot be decoded: .*data.on_error=skip"):
        make(training(damaged))
