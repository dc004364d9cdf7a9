"""Transforms of one image: augmentation in training, resize and center crop in evaluation.

In training every random choice is read from the sample's row of uniform numbers (see draws.py), each from its own slot,
so that enabling or disabling one operation changes no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vit_scale.config import AugmentConfig
from vit_scale.data.augment import color_ops as color
from vit_scale.data.augment.color_ops import Planes
from vit_scale.data.augment.erasing import ERASE_SLOTS, RandomErasing
from vit_scale.data.augment.geometry import (
    GEOMETRY_SLOTS,
    Geometry,
    Row,
    Size,
    center_geometry,
    draw_geometry,
)
from vit_scale.data.augment.rand_augment import RandAugment, parse_spec
from vit_scale.data.augment.resize import crop_image, flip
from vit_scale.data.images.decode import LazyImage

# The slots of a row after those of the geometry.
_THREE = GEOMETRY_SLOTS
_JITTER = _THREE + 2
_ERASE = _JITTER + 4
_RAND = _ERASE + ERASE_SLOTS

_JITTER_OPS = (color.brightness, color.contrast, color.saturation)
_JITTER_ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
_EVAL_OVERSAMPLING = 2.0  # Evaluation decodes files at a smaller scale only if that is not visible.


class TrainTransform:
    """Crop, flip, color operations, RandAugment and erasing; reads rows of `slots` uniform numbers."""

    def __init__(self, augment: AugmentConfig, size: Size, mean: Sequence[float], std: Sequence[float]):
        """`mean` fills the pixels that geometric operations uncover; with `std` it is the noise of random erasing."""
        self.augment, self.size = augment, size
        fill = np.array([min(255, round(255 * value)) for value in mean], np.uint8)
        spec = parse_spec(augment)
        self.rand_augment = RandAugment(spec, augment.interpolation, fill) if spec else None
        self.erasing = RandomErasing(augment.erase, augment.erase_mode, size, mean, std) if augment.erase > 0 else None
        self.slots = _RAND + (self.rand_augment.slots if self.rand_augment else 0)

    def __call__(self, image: LazyImage, u: Row) -> Planes:
        """Return planes [C, *size] of the augmented image."""
        geometry = self.geometry((image.height, image.width), u)
        return self.change([self.crop(image, geometry)], [geometry], [u])[0]

    def geometry(self, image: Size, u: Row) -> Geometry:
        """Draw crop and flips for an image of this size."""
        return draw_geometry(image, self.size, self.augment, u)

    def crop(self, image: LazyImage, geometry: Geometry) -> Planes:
        """Return planes [C, *size], not flipped yet."""
        return crop_image(image, geometry, self.augment.crop_border, oversampling=1.0)

    def change(self, images: list[Planes], geometries: Sequence[Geometry], rows: Sequence[Row]) -> list[Planes]:
        """Apply everything that follows the crop, each operation to all images before the next one."""
        images = [flip(x, geometry.hflip, geometry.vflip) for x, geometry in zip(images, geometries, strict=True)]
        if self.augment.three_augment:
            images = list(map(_three_augment, images, rows))
        if self.rand_augment is not None:
            images = self.rand_augment.change(images, [u[_RAND:] for u in rows])
        if self.augment.color_jitter > 0:
            images = list(map(self._jitter, images, rows))
        if self.erasing is not None:
            images = list(map(self.erasing, images, (u[_ERASE:_RAND] for u in rows)))
        return images

    def _jitter(self, x: Planes, u: Row) -> Planes:
        return _color_jitter(x, self.augment.color_jitter, u[_JITTER : _JITTER + 4])


class EvalTransform:
    """Resize in proportion, then center crop: nothing is random."""

    def __init__(self, augment: AugmentConfig, size: Size):
        self.size, self.filter_name = size, augment.eval_interpolation
        self.cover = (math.floor(size[0] / augment.eval_crop), math.floor(size[1] / augment.eval_crop))

    def __call__(self, image: LazyImage) -> Planes:
        """Return planes [C, *size]."""
        return self.crop(image, self.geometry((image.height, image.width)))

    def geometry(self, image: Size, u: Row = ()) -> Geometry:
        """Return the center crop of an image of this size; no random number is read."""
        return center_geometry(image, self.size, self.cover, self.filter_name)

    def crop(self, image: LazyImage, geometry: Geometry) -> Planes:
        """Return planes [C, *size]."""
        return crop_image(image, geometry, border="black", oversampling=_EVAL_OVERSAMPLING)


def _three_augment(x: Planes, u: Row) -> Planes:
    """3-Augment (Touvron et al., 2022): one of grayscale, solarization and blur."""
    which, radius = u[_THREE : _THREE + 2]
    if which < 1 / 3:
        return np.repeat(color.grayscale(x), len(x), axis=0)
    if which < 2 / 3:
        return color.solarize(x, 128)
    return color.blur(x, 0.1 + 1.9 * radius)


def _color_jitter(x: Planes, strength: float, u: Row) -> Planes:
    """Change brightness, contrast and saturation by random factors around 1, in random order."""
    for i in _JITTER_ORDERS[int(u[3] * len(_JITTER_ORDERS))]:
        low, high = max(0.0, 1 - strength), 1 + strength
        x = _JITTER_OPS[i](x, low + (high - low) * u[i])
    return x
