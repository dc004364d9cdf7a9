"""Look at a dataset: what decides how to train on it, from all labels and a sample of the images."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vit_scale.data.class_sizes import MAX_IMBALANCE
from vit_scale.data.data import Data
from vit_scale.data.images.decode import UnreadableImage, open_image

SAMPLED_IMAGES = 128
SECONDS = 5.0
"""The sample ends after this long: images may be large, or on a slow disk."""
FEW_IMAGES = 20


@dataclass(frozen=True)
class DataFacts:
    """Facts about the data of a run."""

    options: Mapping[str, Any]
    """Options of section `data` that the user chose: at least `source`."""
    train_images: int
    val_images: int
    class_sizes: dict[str, int]
    """Training images by class."""
    channels: int
    size: tuple[int, int]
    """Median height and width of the sampled images."""
    decode_seconds: float
    """Mean time to read and decode an image on one core."""
    unreadable: tuple[str, ...] = ()
    """Names of sampled images that cannot be decoded."""
    sampled: int = 0

    @property
    def classes(self) -> int:
        return len(self.class_sizes)

    @property
    def imbalance(self) -> float:
        """Return the largest class divided by the smallest."""
        return max(self.class_sizes.values()) / max(1, min(self.class_sizes.values()))

    def warnings(self) -> list[str]:
        """Return what makes the data hard to learn from."""
        found = []
        name, smallest = min(self.class_sizes.items(), key=lambda item: item[1])
        if smallest < FEW_IMAGES:
            found.append(f"class {name} has only {smallest} training images; collect more if the accuracy is low")
        if self.imbalance > MAX_IMBALANCE:
            largest = max(self.class_sizes, key=lambda key: self.class_sizes[key])
            remedy = "draws classes equally often" if self.options.get("balance") else "weights classes"
            found.append(f"class {largest} is {self.imbalance:.0f} times as large as class {name}; the recipe {remedy}")
        if self.classes == 1:
            found.append(f"only one class ({name}), so there is nothing to learn")
        if self.val_images < 2 * self.classes:
            found.append(f"{self.val_images} validation images for {self.classes} classes: the accuracy will be noisy")
        if self.unreadable:
            listed = ", ".join(self.unreadable[:3])
            found.append(
                f"{len(self.unreadable)} of {self.sampled} sampled images cannot be read ({listed}); "
                "the recipe skips such images (data.on_error)"
            )
        return found


def look_at_data(options: Mapping[str, Any], data: Data, show: Callable[[str], None]) -> DataFacts:
    """Return the facts about opened data of these options; `show` is called with the progress."""
    labels = data.train.labels
    assert labels is not None
    counts = np.bincount(labels, minlength=data.num_classes)
    indices = np.random.default_rng(0).permutation(len(data.train))[:SAMPLED_IMAGES].tolist()
    sizes, unreadable = [], []
    started = time.perf_counter()
    for done, index in enumerate(indices):
        show(f"{done}/{len(indices)}")
        try:
            image = open_image(data.train.read(index).image, data.in_chans)
            image.crop((0, 0, image.width, image.height), (image.height, image.width))
            sizes.append((image.height, image.width))
        except UnreadableImage:
            unreadable.append(os.path.basename(data.train.describe(index).split(" (row")[0]))
        if time.perf_counter() - started > SECONDS:
            break
    tried = len(sizes) + len(unreadable)
    height, width = np.median(np.array(sizes or [(224, 224)]), axis=0).astype(int).tolist()
    return DataFacts(
        options=options,
        train_images=len(data.train),
        val_images=len(data.val),
        class_sizes=dict(zip(data.class_names, counts.tolist(), strict=True)),
        channels=data.in_chans,
        size=(height, width),
        decode_seconds=(time.perf_counter() - started) / max(1, tried),
        unreadable=tuple(unreadable),
        sampled=tried,
    )
