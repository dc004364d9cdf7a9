"""Cropping and resizing: Pillow's antialiased filters, by torch's kernels for uint8, which are much faster."""

from __future__ import annotations

import numpy as np
import torch

from vit_scale.data.augment.color_ops import Planes, is_small
from vit_scale.data.images.decode import Picture
from vit_scale.data.images.jpeg import Box, Pixels

# What torch.nn.functional.interpolate(antialias=True) calls; its own checks take a fifth of a small image's time.
_RESIZERS = {"bilinear": torch._C._nn._upsample_bilinear2d_aa, "bicubic": torch._C._nn._upsample_bicubic2d_aa}
_MAX_RATIO = 8
"""Longer strips are cropped before they are resized, or one row of pixels would become a gigabyte."""


def resize(pixels: Pixels, size: tuple[int, int], filter_name: str) -> Planes:
    """Pixels [H, W, C] resized to planes [C, *size], with antialiasing."""
    if pixels.shape[:2] == size:
        return pixels.transpose(2, 0, 1).copy()
    # A copy, because torch takes no read-only or mirrored views, and is fast only where channels are last in memory.
    planes = torch.from_numpy(pixels.copy())[None].permute(0, 3, 1, 2)
    resized = _RESIZERS[filter_name](planes, size, False, None)
    return np.ascontiguousarray(resized.numpy()[0])


def flip(x: Planes, horizontally: bool, vertically: bool) -> Planes:
    """Mirror planes. torch copies backwards several times as fast as numpy, but takes longer to start."""
    if not (horizontally or vertically):
        return x
    if is_small(x):
        return np.ascontiguousarray(x[:, :: -1 if vertically else 1, :: -1 if horizontally else 1])
    axes = [axis for axis, wanted in ((2, horizontally), (1, vertically)) if wanted]
    return torch.flip(torch.from_numpy(x), axes).numpy()


def shorter_side_size(height: int, width: int, side: tuple[int, int]) -> tuple[int, int]:
    """Height and width, in proportion, that just cover `side`."""
    if height * side[1] < width * side[0]:
        return side[0], max(side[1], int(side[0] * width / height))
    return max(side[0], int(side[1] * height / width)), side[1]


def resize_to_cover(picture: Picture, side: tuple[int, int], filter_name: str, gap: float) -> Planes:
    """The whole picture (at most its middle, if it is a strip) resized in proportion so that it just covers `side`.

    A file may be decoded at a smaller scale if that leaves `gap` times the pixels that are needed.
    """
    box = _middle(picture.height, picture.width, _MAX_RATIO * max(side[0] / side[1], side[1] / side[0]))
    left, top, right, bottom = box
    size = shorter_side_size(bottom - top, right - left, side)
    pixels = picture.crop(box, (gap * size[0], gap * size[1]))
    return resize(pixels, size, filter_name)


def center_crop(x: Planes, size: tuple[int, int]) -> Planes:
    """The middle of planes that are at least as large."""
    top, left = (round((have - want) / 2) for have, want in zip(x.shape[1:], size, strict=True))
    return np.ascontiguousarray(x[:, top : top + size[0], left : left + size[1]])


def padded_crop(x: Planes, top: int, left: int, size: tuple[int, int], border: str) -> Planes:
    """A crop that may reach beyond the image, where there is its mirror image (`reflect`) or black."""
    rows, columns = np.arange(top, top + size[0]), np.arange(left, left + size[1])
    crop = np.ascontiguousarray(x[:, _reflect(rows, x.shape[1])][:, :, _reflect(columns, x.shape[2])])
    if border == "black":
        crop[:, (rows < 0) | (rows >= x.shape[1])] = 0
        crop[:, :, (columns < 0) | (columns >= x.shape[2])] = 0
    return crop


def _reflect(places: np.ndarray, length: int) -> np.ndarray:
    """Mirror places outside 0..length-1 back inside, without repeating the border."""
    if length == 1:
        return np.zeros_like(places)
    period = 2 * (length - 1)
    places = np.abs(places) % period
    return np.minimum(places, period - places)


def _middle(height: int, width: int, ratio: float) -> Box:
    crop_h, crop_w = min(height, round(width * ratio)), min(width, round(height * ratio))
    top, left = (height - crop_h) // 2, (width - crop_w) // 2
    return left, top, left + crop_w, top + crop_h
