"""Random erasing (Zhong et al., 2020): replace a box of the image by noise or by a color."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from vit_scale.data.augment.color_ops import Planes
from vit_scale.data.draws import noise_bytes

_ATTEMPTS = 10
_AREA = (0.02, 1 / 3)
_RATIO = (0.3, 1 / 0.3)
_NOISE_IMAGES = 4
ERASE_SLOTS = 2 * _ATTEMPTS + 4
"""Random numbers read: whether to erase, two per attempt, the place, the noise."""


class RandomErasing:
    """Erases boxes of timm's areas and ratios.

    Noise is normal with the mean and standard deviation of the data, clipped at 0 and 255, because images are still
    uint8 here; timm erases after normalizing, where nothing is clipped.
    """

    def __init__(
        self, probability: float, mode: str, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]
    ):
        self.probability, self.mode = probability, mode
        # Noise is cut out of one block at a random place: drawing it again would cost more than everything else here.
        length = _NOISE_IMAGES * size[0] * size[1]
        self._noise = np.stack(
            [
                np.take(_normal_levels(255 * m, 255 * s), noise_bytes(channel, length))
                for channel, (m, s) in enumerate(zip(mean, std, strict=True))
            ]
        )

    def __call__(self, x: Planes, u: Sequence[float]) -> Planes:
        """Erase one box of planes [C, H, W], or none."""
        if u[0] >= self.probability:
            return x
        box = erased_box(x.shape[1], x.shape[2], u[1:])
        if box is None:
            return x
        top, left, h, w = box
        x = x.copy()
        x[:, top : top + h, left : left + w] = self._filling(h, w, u[-1])
        return x

    def _filling(self, h: int, w: int, u: float) -> Planes:
        channels, length = self._noise.shape
        if self.mode == "black":
            return np.zeros((channels, 1, 1), np.uint8)
        pixels = (h, w) if self.mode == "pixel" else (1, 1)
        start = int(u * (length - h * w))
        return self._noise[:, start : start + pixels[0] * pixels[1]].reshape(channels, *pixels)


def erased_box(height: int, width: int, u: Sequence[float]) -> tuple[int, int, int, int] | None:
    """Return top, left, height and width of a random box inside the image; None if no attempt fits."""
    for i in range(_ATTEMPTS):
        area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * u[2 * i])
        ratio = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** u[2 * i + 1]
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < h < height and 0 < w < width:
            return int(u[2 * _ATTEMPTS] * (height - h + 1)), int(u[2 * _ATTEMPTS + 1] * (width - w + 1)), h, w
    return None


def _normal_levels(mean: float, std: float) -> npt.NDArray[np.uint8]:
    """Return 256 equally likely levels of a normal distribution, so that a uniform byte looks up a normal level."""
    normal = NormalDist(mean, std)
    levels = [normal.inv_cdf((i + 0.5) / 256) for i in range(256)]
    return np.clip(np.rint(levels), 0, 255).astype(np.uint8)
