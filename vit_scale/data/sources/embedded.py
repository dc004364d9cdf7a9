"""Sources without a download: scikit-learn's handwritten digits, and synthetic images for benchmarks."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vit_scale.data.batch import Sample


@cache
def digits() -> Any:
    """Return 1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak, 1998) as a dataset with one split."""
    import datasets
    from PIL import Image
    from sklearn.datasets import load_digits

    def png(pixels: npt.NDArray[np.uint8]) -> dict[str, Any]:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        return {"bytes": file.getvalue(), "path": None}

    raw = load_digits()
    pixels = np.round(raw.images * (255 / 16)).astype(np.uint8)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(digit) for digit in range(10)])}
    )
    columns = {"image": [png(image) for image in pixels], "label": raw.target.astype(int)}
    return datasets.Dataset.from_dict(columns, features=features)


@dataclass(frozen=True)
class SyntheticSource:
    """Any number of noise images at no cost: each is a window onto one block of noise, and is read without a copy.

    The window depends on the class and shifts a little with the index, so that there is something to learn.
    """

    length: int
    num_classes: int
    size: int
    channels: int
    name: str
    seed: int
    first: int = 0
    """Number of the first image; separates training and validation images."""

    def __len__(self) -> int:
        return self.length

    def read(self, index: int) -> Sample:
        """Return pixels [H, W, C] and the label."""
        number = self.first + index
        label = self.read_target(index)
        shift = (number // self.num_classes) % 4
        left, top = label * 37 % 256 + shift, label * 101 % 256 + shift
        return Sample(self._noise[top : top + self.size, left : left + self.size], label)

    def read_target(self, index: int) -> int:
        """Return the label alone."""
        return (self.first + index) % self.num_classes

    def describe(self, index: int) -> str:
        """Name an image in messages."""
        return f"image {self.first + index} of {self.name}"

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Labels of all images."""
        return (self.first + np.arange(self.length, dtype=np.int64)) % self.num_classes

    @cached_property
    def _noise(self) -> npt.NDArray[np.uint8]:
        side = self.size + 260
        return np.random.default_rng(self.seed).integers(0, 256, (side, side, self.channels), dtype=np.uint8)
