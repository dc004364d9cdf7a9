"""What happens to one image: augmentation in training, resize and centre crop in evaluation.

In training every random choice is read from the position's row of uniform numbers (see draws.py), each from its own
slot, so that switching one operation on or off changes no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vit_scale.config import AugmentConfig
from vit_scale.data.augment import color_ops as color
from vit_scale.data.augment.color_ops import Planes
from vit_scale.data.augment.erasing import ERASE_SLOTS, RandomErasing
from vit_scale.data.augment.rand_augment import RandAugment, parse_spec
from vit_scale.data.augment.resize import center_crop, flip, padded_crop, resize, resize_to_cover
from vit_scale.data.images.decode import Picture
from vit_scale.data.images.jpeg import Box

Row = Sequence[float]

# The slots of a row.
_CROP_TRIES = 10
_CROP = 0  # Two for each try.
_PLACE = _CROP + 2 * _CROP_TRIES
_FILTER = _PLACE + 2
_HFLIP = _FILTER + 1
_VFLIP = _HFLIP + 1
_THREE = _VFLIP + 1
_JITTER = _THREE + 2
_ERASE = _JITTER + 4
_RAND = _ERASE + ERASE_SLOTS

_JITTER_OPS = (color.brightness, color.contrast, color.saturation)
_JITTER_ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
_EVAL_GAP = 2.0  # Evaluation shrinks files while decoding only where that is not to be seen.


class TrainTransform:
    """Crop, flip, colour, RandAugment and erasing of a picture; `slots` is the length of the row it reads."""

    def __init__(self, augment: AugmentConfig, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]):
        """`mean` is the colour that fills what geometric operations uncover; with `std` it is erasing's noise."""
        self.augment, self.size = augment, size
        fill = np.array([min(255, round(255 * value)) for value in mean], np.uint8)
        spec = parse_spec(augment)
        self.rand_augment = RandAugment(spec, augment.interpolation, fill) if spec else None
        self.erasing = RandomErasing(augment.erase, augment.erase_mode, size, mean, std) if augment.erase > 0 else None
        self.slots = _RAND + (self.rand_augment.slots if self.rand_augment else 0)

    def __call__(self, picture: Picture, u: Row) -> Planes:
        """Planes [C, *size] of the augmented picture."""
        return self.change([self.crop(picture, u)], [u])[0]

    def change(self, images: list[Planes], rows: Sequence[Row]) -> list[Planes]:
        """All that follows the crop, each operation on all of these images before the next one."""
        images = list(map(self._flip, images, rows))
        if self.augment.three_augment:
            images = list(map(_three_augment, images, rows))
        if self.rand_augment is not None:
            images = self.rand_augment.change(images, [u[_RAND:] for u in rows])
        if self.augment.color_jitter > 0:
            images = list(map(self._jitter, images, rows))
        if self.erasing is not None:
            images = list(map(self.erasing, images, (u[_ERASE:_RAND] for u in rows)))
        return images

    def _flip(self, x: Planes, u: Row) -> Planes:
        return flip(x, u[_HFLIP] < self.augment.hflip, u[_VFLIP] < self.augment.vflip)

    def _jitter(self, x: Planes, u: Row) -> Planes:
        return _color_jitter(x, self.augment.color_jitter, u[_JITTER : _JITTER + 4])

    def crop(self, picture: Picture, u: Row) -> Planes:
        """Planes [C, *size] of a part of the picture, or of all of it."""
        filter_name = self.augment.interpolation
        if filter_name == "random":
            filter_name = "bicubic" if u[_FILTER] < 0.5 else "bilinear"
        if self.augment.crop == "random_resized":
            box = random_resized_box(picture.height, picture.width, self.augment, u)
            return resize(picture.crop(box, self.size), self.size, filter_name)
        x = resize_to_cover(picture, self.size, filter_name, gap=1.0)
        if self.augment.crop == "none":
            return center_crop(x, self.size)
        pad = self.augment.crop_padding
        top, left = (int(u[_PLACE + i] * (x.shape[i + 1] - self.size[i] + 2 * pad + 1)) - pad for i in range(2))
        return padded_crop(x, top, left, self.size, self.augment.crop_border)


class EvalTransform:
    """Resize in proportion, then centre crop: no choice is random."""

    def __init__(self, augment: AugmentConfig, size: tuple[int, int]):
        self.size, self.filter_name = size, augment.eval_interpolation
        self.cover = (math.floor(size[0] / augment.eval_crop), math.floor(size[1] / augment.eval_crop))

    def __call__(self, picture: Picture, u: Row = ()) -> Planes:
        """Planes [C, *size]; no random number is read."""
        return center_crop(resize_to_cover(picture, self.cover, self.filter_name, _EVAL_GAP), self.size)


def random_resized_box(height: int, width: int, augment: AugmentConfig, u: Row) -> Box:
    """A box of a random share of the area and a random ratio, at a random place.

    Ten tries to fit one into the picture; then the largest box in the middle whose ratio is allowed.
    """
    (least, most), (narrow, wide) = augment.crop_scale, augment.crop_ratio
    for i in range(_CROP_TRIES):
        area = height * width * (least + (most - least) * u[_CROP + 2 * i])
        ratio = narrow * (wide / narrow) ** u[_CROP + 2 * i + 1]
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(u[_PLACE] * (height - h + 1)), int(u[_PLACE + 1] * (width - w + 1))
            return left, top, left + w, top + h
    w, h = min(width, max(1, round(height * wide))), min(height, max(1, round(width / narrow)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _three_augment(x: Planes, u: Row) -> Planes:
    """3-Augment (Touvron et al., 2022): grayscale, solarization or blur, one of them."""
    which, radius = u[_THREE : _THREE + 2]
    if which < 1 / 3:
        return np.repeat(color.grayscale(x), len(x), axis=0)
    if which < 2 / 3:
        return color.solarize(x, 128)
    return color.blur(x, 0.1 + 1.9 * radius)


def _color_jitter(x: Planes, strength: float, u: Row) -> Planes:
    """Brightness, contrast and saturation by random factors around 1, in random order."""
    for i in _JITTER_ORDERS[int(u[3] * len(_JITTER_ORDERS))]:
        low, high = max(0.0, 1 - strength), 1 + strength
        x = _JITTER_OPS[i](x, low + (high - low) * u[i])
    return x
