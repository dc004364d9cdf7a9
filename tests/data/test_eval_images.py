"""A cap on validation images: always the same ones, of all classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from vit_scale.config import DataConfig
from vit_scale.data.data import Data, open_data
from vit_scale.data.eval_images import limit_images


def numbers(batches: Iterator) -> list[int]:
    return [int(image[0, 0, 0]) for batch in batches for image in batch.images[batch.real]]


def test_capped_images_are_the_same_every_time_and_of_all_classes(image_folder: Path, eval_loader: Callable) -> None:
    config = DataConfig(source=str(image_folder), val_fraction=0.5)
    first, again = (limit_images(open_data(config, seed=seed).val, 6) for seed in (0, 1))
    assert np.bincount(first.labels).tolist() == [2, 2, 2]
    assert numbers(eval_loader(first)) == numbers(eval_loader(again))
    two = [eval_loader(first, batch=2, rank=rank, world=2) for rank in (0, 1)]
    assert sorted(number for rank in two for number in numbers(rank)) == sorted(numbers(eval_loader(first)))


@pytest.mark.parametrize("count", [None, 10**6])
def test_cap_above_the_number_of_images_changes_nothing(digits: Data, count: int | None) -> None:
    assert limit_images(digits.val, count) is digits.val


def test_synthetic_images_are_capped() -> None:
    config = DataConfig(source="synthetic", synthetic_images=300, synthetic_classes=5, synthetic_size=8)
    capped = limit_images(open_data(config, seed=0).val, 10)
    assert np.bincount(capped.labels).tolist() == [2] * 5


@pytest.mark.parametrize("length", [None, 11])
def test_first_images_of_a_stream_are_used(length: int | None, eval_loader: Callable) -> None:
    import datasets

    from vit_scale.data.sources.streams import StreamSource
    from vit_scale.data.targets import ClassTarget, Columns

    rows = {"image": [np.full((8, 8), i, np.uint8).tolist() for i in range(11)], "label": [i % 2 for i in range(11)]}
    table = datasets.Dataset.from_dict(rows).to_iterable_dataset()
    images = table.map(lambda row: {"image": np.asarray(row["image"], np.uint8)})
    source = StreamSource(images, "image", ClassTarget(), Columns(("label",), ("a", "b")), "stream", length)
    capped = limit_images(source, 5)
    ranks = [eval_loader(capped, batch=2, rank=rank, world=2) for rank in (0, 1)]
    assert sorted(number for rank in ranks for number in numbers(rank)) == [0, 1, 2, 3, 4]
    assert capped.length == (None if length is None else 5)  # type: ignore[attr-defined]
