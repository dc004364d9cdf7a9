"""Cropping and resizing with Pillow's antialiased filters, by torch's uint8 kernels, which are much faster."""

from __future__ import annotations

import numpy as np
import torch

from vit_scale.data.augment.color_ops import Planes, is_small
from vit_scale.data.augment.geometry import NO_PADDING, Geometry
from vit_scale.data.images.decode import LazyImage
from vit_scale.data.images.jpeg import Pixels

# Called by torch.nn.functional.interpolate(antialias=True), whose checks take 20% of the time of a small image.
_RESIZERS = {"bilinear": torch._C._nn._upsample_bilinear2d_aa, "bicubic": torch._C._nn._upsample_bicubic2d_aa}


def crop_image(image: LazyImage, geometry: Geometry, border: str, oversampling: float) -> Planes:
    """Return planes [C, *size] of an image, before flips.

    `border` is what padding shows: the mirrored image (`reflect`) or `black`. A file may be decoded at a smaller scale
    that has at least `oversampling` times the height and width of the resized box.
    """
    padded = geometry.padding != NO_PADDING
    size = geometry.resized if padded else geometry.size
    pixels = image.crop(geometry.box, (oversampling * size[0], oversampling * size[1]))
    x = resize(pixels, size, geometry.filter)
    return _pad(x, geometry, border) if padded else x


def resize(pixels: Pixels, size: tuple[int, int], filter_name: str) -> Planes:
    """Resize pixels [H, W, C] to planes [C, *size], with antialiasing."""
    if pixels.shape[:2] == size:
        return pixels.transpose(2, 0, 1).copy()
    # A copy, because torch takes no read-only or mirrored views, and is fast only if channels are last in memory.
    planes = torch.from_numpy(pixels.copy())[None].permute(0, 3, 1, 2)
    resized = _RESIZERS[filter_name](planes, size, False, None)
    return np.ascontiguousarray(resized.numpy()[0])


def flip(x: Planes, horizontally: bool, vertically: bool) -> Planes:
    """Mirror planes. torch reverses several times as fast as numpy, but has more overhead per call."""
    if not (horizontally or vertically):
        return x
    if is_small(x):
        return np.ascontiguousarray(x[:, :: -1 if vertically else 1, :: -1 if horizontally else 1])
    axes = [axis for axis, flipped in ((2, horizontally), (1, vertically)) if flipped]
    return torch.flip(torch.from_numpy(x), axes).numpy()


def _pad(x: Planes, geometry: Geometry, border: str) -> Planes:
    """Add the geometry's padding to planes; negative padding crops."""
    left, top, right, bottom = geometry.padding
    height, width = geometry.size
    if max(geometry.padding) <= 0:
        return np.ascontiguousarray(x[:, -top : height - top, -left : width - left])
    rows, columns = np.arange(-top, height - top), np.arange(-left, width - left)
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
