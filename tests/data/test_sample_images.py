"""A look at a few images before training."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from PIL import Image

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.batch import ImageSource
from vit_scale.data.sample_images import glance
from vit_scale.data.sources.table_source import open_data
from vit_scale.errors import UserError

PLAIN = AugmentConfig(eval_crop=1.0)


def folder_of_images(folder: Path, broken: int = 0) -> ImageSource:
    """Ten gray images in two classes, each as bright as 20 times its number; the first `broken` cannot be read."""
    for i in range(10):
        path = folder / str(i // 5) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i < broken:
            path.write_bytes(b"not a picture")
        else:
            Image.new("RGB", (12, 8), (20 * i,) * 3).save(path)
    return cast(ImageSource, open_data(DataConfig(source=str(folder), val_fraction=1e-9), seed=0).train)


def test_images_are_taken_evenly_and_as_evaluation_shows_them(tmp_path: Path) -> None:
    source = folder_of_images(tmp_path)
    images = glance(source, 4, augment=PLAIN, img_size=(8, 8), in_chans=3)
    assert images.shape == (4, 3, 8, 8)
    assert images.dtype.is_floating_point is False
    all_of_them = glance(source, len(source), augment=PLAIN, img_size=(8, 8), in_chans=3)
    taken = [int((all_of_them == image).flatten(1).all(1).nonzero()[0]) for image in images]
    assert (taken[0], taken[-1]) == (0, len(source) - 1)
    gaps = [after - before for before, after in pairwise(taken)]
    assert max(gaps) - min(gaps) <= 1


def test_no_more_images_than_there_are(tmp_path: Path) -> None:
    source = folder_of_images(tmp_path)
    assert len(glance(source, 1000, augment=PLAIN, img_size=(8, 8), in_chans=3)) == len(source)


def test_broken_images_are_left_out(tmp_path: Path) -> None:
    source = folder_of_images(tmp_path, broken=3)
    assert len(glance(source, 1000, augment=PLAIN, img_size=(8, 8), in_chans=1)) == len(source) - 3


def test_nothing_to_look_at_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none can be read"):
        glance(folder_of_images(tmp_path, broken=10), 5, augment=PLAIN, img_size=(8, 8), in_chans=3)
