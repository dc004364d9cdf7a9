"""Sample images for computations before training."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from PIL import Image

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.batch import ImageSource
from vit_scale.data.data import open_data
from vit_scale.data.sample_images import load_sample_images
from vit_scale.errors import UserError

PLAIN = AugmentConfig(eval_crop=1.0)


def folder_of_images(folder: Path, unreadable: int = 0) -> ImageSource:
    """Write ten gray images of level 20 times their number; the first `unreadable` cannot be read."""
    for i in range(10):
        path = folder / str(i // 5) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i < unreadable:
            path.write_bytes(b"not an image")
        else:
            Image.new("RGB", (12, 8), (20 * i,) * 3).save(path)
    return cast(ImageSource, open_data(DataConfig(source=str(folder), val_fraction=1e-9), seed=0).train)


def test_images_are_evenly_spread_and_transformed_as_in_evaluation(tmp_path: Path) -> None:
    source = folder_of_images(tmp_path)
    images = load_sample_images(source, 4, augment=PLAIN, img_size=(8, 8), in_chans=3)
    assert images.shape == (4, 3, 8, 8)
    assert images.dtype.is_floating_point is False
    all_images = load_sample_images(source, len(source), augment=PLAIN, img_size=(8, 8), in_chans=3)
    taken = [int((all_images == image).flatten(1).all(1).nonzero()[0]) for image in images]
    assert (taken[0], taken[-1]) == (0, len(source) - 1)
    gaps = [after - before for before, after in pairwise(taken)]
    assert max(gaps) - min(gaps) <= 1


def test_no_more_images_than_the_source_has(tmp_path: Path) -> None:
    source = folder_of_images(tmp_path)
    assert len(load_sample_images(source, 1000, augment=PLAIN, img_size=(8, 8), in_chans=3)) == len(source)


def test_unreadable_images_are_skipped(tmp_path: Path) -> None:
    source = folder_of_images(tmp_path, unreadable=3)
    assert len(load_sample_images(source, 1000, augment=PLAIN, img_size=(8, 8), in_chans=1)) == len(source) - 3


def test_source_without_readable_images_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all sampled images are unreadable"):
        load_sample_images(folder_of_images(tmp_path, unreadable=10), 5, augment=PLAIN, img_size=(8, 8), in_chans=3)
