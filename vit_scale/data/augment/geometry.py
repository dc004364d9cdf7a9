"""Where the pixels of a transformed image come from: drawn once per sample, then applied to image, mask and boxes.

All random choices are read from the first slots of the sample's row of uniform numbers (see draws.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from vit_scale.config import AugmentConfig
from vit_scale.data.images.jpeg import Box

Row = Sequence[float]
Size = tuple[int, int]
"""height, width"""
Padding = tuple[int, int, int, int]
"""left, top, right, bottom"""
NO_PADDING: Padding = (0, 0, 0, 0)

_CROP_ATTEMPTS = 10
# The slots of a row.
_CROP = 0  # Two per attempt.
_PLACE = _CROP + 2 * _CROP_ATTEMPTS
_FILTER = _PLACE + 2
_HFLIP = _FILTER + 1
_VFLIP = _HFLIP + 1
GEOMETRY_SLOTS = _VFLIP + 1
"""Uniform numbers read by `draw_geometry`."""

_MAX_RATIO = 8
"""Longer strips are cropped before resizing; otherwise one row of pixels would become a gigabyte."""


class Geometry(NamedTuple):
    """Crop `box` out of the image, resize it to `resized`, add `padding`, then flip."""

    image: Size
    """Size of the image that `box` refers to."""
    box: Box
    """left, top, right, bottom"""
    padding: Padding
    """Pixels added to the resized box at left, top, right and bottom; a negative number crops."""
    size: Size
    """Size of the result."""
    hflip: bool
    vflip: bool
    filter: str
    """Interpolation of pixels; masks always take the nearest pixel."""

    @property
    def resized(self) -> Size:
        """Size of the resized box before padding."""
        left, top, right, bottom = self.padding
        return self.size[0] - top - bottom, self.size[1] - left - right


def draw_geometry(image: Size, size: Size, augment: AugmentConfig, u: Row) -> Geometry:
    """Draw crop, interpolation and flips of a training image from its row of uniform numbers."""
    filter_name = augment.interpolation
    if filter_name == "random":
        filter_name = "bicubic" if u[_FILTER] < 0.5 else "bilinear"
    if augment.crop == "random_resized":
        box, padding = random_resized_box(image[0], image[1], augment, u), NO_PADDING
    else:
        box, padding = _draw_place(image, size, augment, u)
    return Geometry(image, box, padding, size, u[_HFLIP] < augment.hflip, u[_VFLIP] < augment.vflip, filter_name)


def center_geometry(image: Size, size: Size, cover: Size, filter_name: str) -> Geometry:
    """Resize the image in proportion so that it just covers `cover`, then crop the center."""
    box, resized = _cover(image, cover)
    return Geometry(image, box, _center(resized, size), size, False, False, filter_name)


def random_resized_box(height: int, width: int, augment: AugmentConfig, u: Row) -> Box:
    """Draw a box of a random area and aspect ratio at a random place.

    After ten attempts that do not fit, return the largest centered box whose ratio is allowed.
    """
    (smallest, largest), (narrow, wide) = augment.crop_scale, augment.crop_ratio
    for i in range(_CROP_ATTEMPTS):
        area = height * width * (smallest + (largest - smallest) * u[_CROP + 2 * i])
        ratio = narrow * (wide / narrow) ** u[_CROP + 2 * i + 1]
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(u[_PLACE] * (height - h + 1)), int(u[_PLACE + 1] * (width - w + 1))
            return left, top, left + w, top + h
    w, h = min(width, max(1, round(height * wide))), min(height, max(1, round(width / narrow)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def shorter_side_size(height: int, width: int, side: Size) -> Size:
    """Return the smallest size in proportion to the given one that covers `side`."""
    if height * side[1] < width * side[0]:
        return side[0], max(side[1], int(side[0] * width / height))
    return max(side[0], int(side[1] * height / width)), side[1]


def _draw_place(image: Size, size: Size, augment: AugmentConfig, u: Row) -> tuple[Box, Padding]:
    """Resize the image to cover the size, then take the center or a random place."""
    box, resized = _cover(image, size)
    if augment.crop == "none":
        return box, _center(resized, size)
    border = augment.crop_padding
    top, left = (int(u[_PLACE + i] * (resized[i] - size[i] + 2 * border + 1)) - border for i in range(2))
    return box, _padding(resized, size, top, left)


def _cover(image: Size, side: Size) -> tuple[Box, Size]:
    """Return the box to resize, the full image except for long strips, and the size that just covers `side`."""
    height, width = image
    ratio = _MAX_RATIO * max(side[0] / side[1], side[1] / side[0])
    h, w = min(height, round(width * ratio)), min(width, round(height * ratio))
    top, left = (height - h) // 2, (width - w) // 2
    return (left, top, left + w, top + h), shorter_side_size(h, w, side)


def _center(resized: Size, size: Size) -> Padding:
    return _padding(resized, size, round((resized[0] - size[0]) / 2), round((resized[1] - size[1]) / 2))


def _padding(resized: Size, size: Size, top: int, left: int) -> Padding:
    """Return the padding that starts the result at (top, left) of the resized box."""
    return -left, -top, left + size[1] - resized[1], top + size[0] - resized[0]
