"""Shear, translation and rotation of one image, as Pillow's affine transforms, on planes [C, H, W] of uint8.

Shear and translation move pixels along one axis only, so they are interpolated along that axis alone: the same result
as Pillow's two-dimensional interpolation for a fraction of its work. What comes from outside takes the fill levels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import grid_sample

from vit_scale.data.color_ops import Planes


def shear_x(x: Planes, factor: float, bicubic: bool, fill: Planes) -> Planes:
    """Row `y` moves by `factor * y` pixels."""
    return _shear(x, factor * (np.arange(x.shape[1]) + 0.5), 2, bicubic, fill)


def shear_y(x: Planes, factor: float, bicubic: bool, fill: Planes) -> Planes:
    """Column `x` moves by `factor * x` pixels."""
    return _shear(x, factor * (np.arange(x.shape[2]) + 0.5), 1, bicubic, fill)


def translate_x(x: Planes, fraction: float, bicubic: bool, fill: Planes) -> Planes:
    """Move left by a fraction of the width."""
    return _translate(x, fraction * x.shape[2], 2, bicubic, fill)


def translate_y(x: Planes, fraction: float, bicubic: bool, fill: Planes) -> Planes:
    """Move up by a fraction of the height."""
    return _translate(x, fraction * x.shape[1], 1, bicubic, fill)


def _translate(x: Planes, shift: float, axis: int, bicubic: bool, fill: Planes) -> Planes:
    """Pixel p of the result is pixel p + shift of the image along the axis."""
    length, whole = x.shape[axis], math.floor(shift)
    weights, first = _weights(np.array(shift - whole), bicubic)
    wide = _window(x, axis, whole + first, length + len(weights) - 1)
    moved = _weighted_sum(wide.astype(np.float32), weights.reshape(-1, 1, 1, 1), axis)
    source = np.arange(length) + 0.5 + shift
    moved[_along(axis, (source < 0) | (source >= length))] = fill.reshape(-1, 1, 1)
    return moved


def _shear(x: Planes, shifts: npt.NDArray[np.floating], axis: int, bicubic: bool, fill: Planes) -> Planes:
    """Every line along the axis (a row for 2, a column for 1) is translated by its own shift."""
    length, whole = x.shape[axis], np.floor(shifts).astype(np.int64)
    weights, first = _weights(shifts - whole, bicubic)
    size = length + len(weights) - 1
    # Wide enough for all lines; then each is taken from its own place.
    wide = _window(x, axis, int(whole.min()) + first, size + int(np.ptp(whole)))
    width, offset = wide.shape[2], whole - whole.min()
    if axis == 2:
        down, across = np.arange(len(shifts)) * width + offset, np.arange(size)
    else:
        down, across = np.arange(size) * width, offset * width + np.arange(width)
    index = down[:, None] + across
    lines = np.empty((len(x), *index.shape), np.float32)
    for line, plane in zip(lines, wide.reshape(len(x), -1), strict=True):
        line[:] = plane[index]
    over_lines = (-1, 1) if axis == 2 else (1, -1)
    moved = _weighted_sum(lines, weights.reshape(len(weights), 1, *over_lines), axis)
    # In each line the pixels from `inside` on, before `beyond`, come from inside the image.
    inside, beyond = (np.ceil(edge - 0.5 - shifts).astype(np.int32).reshape(over_lines) for edge in (0, length))
    places = np.arange(length, dtype=np.int32).reshape(over_lines[::-1])
    _fill_outside(moved, (places < inside) | (places >= beyond), fill)
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


def _weighted_sum(levels: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], axis: int) -> Planes:
    """Sum over neighbours along the axis; fractions of a level are cut off, as Pillow does."""
    length = levels.shape[axis] - len(weights) + 1
    pixels, factors = torch.from_numpy(levels), torch.from_numpy(weights)
    out = pixels.narrow(axis, 0, length) * factors[0]
    for i in range(1, len(weights)):
        out.addcmul_(pixels.narrow(axis, i, length), factors[i])
    return out.clamp_(0, 255).numpy().astype(np.uint8)


def _along(axis: int, part: Any) -> tuple[Any, ...]:
    """Index of a part along the axis."""
    return (slice(None),) * axis + (part,)


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
