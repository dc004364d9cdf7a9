"""Shear, translation and rotation of one image, as Pillow's affine transforms, on planes [C, H, W] of uint8.

Shear and translation move pixels along one axis only, so they are interpolated along that axis alone: the same result
as Pillow's two-dimensional interpolation for a fraction of its work. What comes from outside takes the fill levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import grid_sample

from vit_scale.data.color_ops import Planes


def shear_x(x: Planes, factor: float, bicubic: bool, fill: Planes) -> Planes:
    """Row `y` moves by `factor * y` pixels."""
    return _shift_rows(x, factor * (np.arange(x.shape[1]) + 0.5), bicubic, fill)


def shear_y(x: Planes, factor: float, bicubic: bool, fill: Planes) -> Planes:
    """Column `x` moves by `factor * x` pixels."""
    return shear_x(x.swapaxes(1, 2), factor, bicubic, fill).swapaxes(1, 2)


def translate_x(x: Planes, fraction: float, bicubic: bool, fill: Planes) -> Planes:
    """Move left by a fraction of the width."""
    return _translate(x, fraction * x.shape[2], 2, bicubic, fill)


def translate_y(x: Planes, fraction: float, bicubic: bool, fill: Planes) -> Planes:
    """Move up by a fraction of the height."""
    return _translate(x, fraction * x.shape[1], 1, bicubic, fill)


def _translate(x: Planes, shift: float, axis: int, bicubic: bool, fill: Planes) -> Planes:
    """Pixel p of the result is pixel p + shift of the image along the axis."""
    length = x.shape[axis]
    whole = math.floor(shift)
    weights, first = _weights(np.array(shift - whole), bicubic)
    wide = _window(x, axis, whole + first, length + len(weights) - 1)
    taps = [wide[_along(axis, slice(i, i + length))] for i in range(len(weights))]
    moved = _weighted_sum(taps, weights)
    source = np.arange(length) + 0.5 + shift
    moved[_along(axis, (source < 0) | (source >= length))] = fill.reshape(-1, 1, 1)
    return moved


def _window(x: Planes, axis: int, start: int, size: int) -> Planes:
    """`size` pixels along the axis from `start` on; beyond the border its last pixel is repeated."""
    length = x.shape[axis]
    before = min(max(-start, 0), size)
    after = min(max(start + size - length, 0), size)
    shape = list(x.shape)
    shape[axis] = size
    out = np.empty(shape, np.uint8)
    out[_along(axis, slice(before, size - after))] = x[_along(axis, slice(start + before, start + size - after))]
    out[_along(axis, slice(0, before))] = x[_along(axis, slice(0, 1))]
    out[_along(axis, slice(size - after, size))] = x[_along(axis, slice(length - 1, length))]
    return out


def _along(axis: int, part: Any) -> tuple[Any, ...]:
    """Index of a part along the axis."""
    return (slice(None),) * axis + (part,)


def _shift_rows(x: Planes, shifts: npt.NDArray[np.floating], bicubic: bool, fill: Planes) -> Planes:
    """Row y of the result at column c is row y of the image at column c + shifts[y]."""
    channels, height, width = x.shape
    whole = np.floor(shifts).astype(np.int64)
    weights, first = _weights(shifts - whole, bicubic)
    # Wide enough that no column that any row needs is outside.
    start, size = int(whole.min()) + first, int(np.ptp(whole)) + width + len(weights) - 1
    wide = _window(x, 2, start, size)
    columns = np.arange(width + len(weights) - 1) + (whole - whole.min() + np.arange(height) * size)[:, None]
    rows = np.take(wide.reshape(channels, -1), columns, axis=1)
    moved = _weighted_sum([rows[:, :, i : i + width] for i in range(len(weights))], weights[:, :, None])
    # In each row the pixels from `first_inside` on, before `first_beyond`, come from inside the image.
    first_inside, first_beyond = np.ceil(-0.5 - shifts)[:, None], np.ceil(width - 0.5 - shifts)[:, None]
    across = np.arange(width, dtype=np.int32)
    _fill_outside(moved, (across < first_inside.astype(np.int32)) | (across >= first_beyond.astype(np.int32)), fill)
    return moved


def _weighted_sum(taps: Sequence[Planes], weights: npt.NDArray[np.float32]) -> Planes:
    """Fractions of a level are cut off, as Pillow does."""
    factors = torch.from_numpy(weights)
    out = torch.from_numpy(taps[0].astype(np.float32)).mul_(factors[0])
    for tap, factor in zip(taps[1:], factors[1:], strict=True):
        out.addcmul_(torch.from_numpy(tap.astype(np.float32)), factor)
    return out.clamp_(0, 255).numpy().astype(np.uint8)


def _weights(d: npt.NDArray[np.floating], bicubic: bool) -> tuple[npt.NDArray[np.float32], int]:
    """Weights of the pixels around a place that lies `d` (0 to 1) after a pixel, and where the first of them is.

    Bicubic is cubic convolution with a = -1, Pillow's choice for transforms (its resizing has -0.5).
    """
    if not bicubic:
        return np.stack([1 - d, d]).astype(np.float32), 0
    e = 1 - d
    return np.stack([-d * e**2, _cubic_inner(d), _cubic_inner(e), -e * d**2]).astype(np.float32), -1


def _cubic_inner(t: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return t**3 - 2 * t**2 + 1


def _fill_outside(x: Planes, outside: npt.NDArray[np.bool_], fill: Planes) -> None:
    for plane, level in zip(x, fill, strict=True):
        np.copyto(plane, level, where=outside)


def rotate(x: Planes, degrees: float, bicubic: bool, fill: Planes) -> Planes:
    """Rotate about the centre, counter-clockwise."""
    _, height, width = x.shape
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    across = (torch.arange(width) + 0.5) * 2 - width
    down = ((torch.arange(height) + 0.5) * 2 - height)[:, None]
    # Where each pixel comes from; -1 to 1 is the image from edge to edge.
    grid = torch.empty(height, width, 2)
    torch.add(across * (cos / width), down * (-sin / width), out=grid[:, :, 0])
    torch.add(across * (sin / height), down * (cos / height), out=grid[:, :, 1])
    pixels = torch.from_numpy(x.astype(np.float32))
    mode = "bicubic" if bicubic else "bilinear"
    out = grid_sample(pixels[None], grid[None], mode, padding_mode="border", align_corners=False)[0]
    rotated = out.clamp_(0, 255).numpy().astype(np.uint8)
    from_x, from_y = np.abs(grid[:, :, 0].numpy()), np.abs(grid[:, :, 1].numpy())
    _fill_outside(rotated, (from_x > 1) | (from_y > 1), fill)
    return rotated
