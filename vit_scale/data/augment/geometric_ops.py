"""Shear, translate and rotate one image like Pillow's affine transforms, on planes [C, H, W] of uint8.

Shear and translation move pixels along one axis only, so they are interpolated along that axis alone: the same result
as Pillow's two-dimensional interpolation for a fraction of its work. Pixels from outside get the fill levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from torch.nn.functional import grid_sample

from vit_scale.data.augment.color_ops import Planes, is_small

_ROWS_OF_PLANES = "RGB;L"
"""Pillow's raw mode of a row of red, then green, then blue: closer to planes than interleaved pixels."""


def shear_x(x: Planes, factor: float, bicubic: bool, fill: Planes) -> Planes:
    """Move row `y` by `factor * y` pixels."""
    if is_small(x):
        return _by_pillow(x, (1, factor, 0, 0, 1, 0), bicubic, fill)
    return _shift_rows(x, factor * (np.arange(x.shape[1]) + 0.5), bicubic, fill)


def shear_y(x: Planes, factor: float, bicubic: bool, fill: Planes) -> Planes:
    """Move column `x` by `factor * x` pixels."""
    if is_small(x):
        return _by_pillow(x, (1, 0, 0, factor, 1, 0), bicubic, fill)
    transposed = np.ascontiguousarray(x.swapaxes(1, 2))
    return np.ascontiguousarray(shear_x(transposed, factor, bicubic, fill).swapaxes(1, 2))


def translate_x(x: Planes, fraction: float, bicubic: bool, fill: Planes) -> Planes:
    """Move left by a fraction of the width."""
    return _translate(x, fraction * x.shape[2], 2, bicubic, fill)


def translate_y(x: Planes, fraction: float, bicubic: bool, fill: Planes) -> Planes:
    """Move up by a fraction of the height."""
    return _translate(x, fraction * x.shape[1], 1, bicubic, fill)


def _translate(x: Planes, shift: float, axis: int, bicubic: bool, fill: Planes) -> Planes:
    """Return pixel p + shift of the image at pixel p, along the axis."""
    length, integer = x.shape[axis], math.floor(shift)
    weights, first = _weights(shift - integer, bicubic)
    wide = _window(x, axis, integer + first, length + len(weights) - 1)
    moved = _weighted_sum(wide, weights, axis)
    # Pixels from `inside` to before `beyond` come from inside the image.
    inside, beyond = (min(max(math.ceil(edge - 0.5 - shift), 0), length) for edge in (0, length))
    for outside in (slice(0, inside), slice(beyond, length)):
        moved[_along(axis, outside)] = fill.reshape(-1, 1, 1)
    return moved


def _shift_rows(x: Planes, shifts: npt.NDArray[np.floating], bicubic: bool, fill: Planes) -> Planes:
    """Return row y at column c + shifts[y] of the image at row y, column c."""
    width, integer = x.shape[2], np.floor(shifts).astype(np.int64)
    weights, first = _weights(shifts - integer, bicubic)
    size, start = width + len(weights) - 1, int(integer.min())
    # Wide enough for all rows; each row is then cut out at its own place.
    wide = _window(x, 2, start + first, size + int(np.ptp(integer)))
    rows = sliding_window_view(wide, size, axis=2)[:, np.arange(len(shifts)), integer - start]
    moved = _weighted_sum(rows, [weight[:, None].astype(np.float32) for weight in weights], 2)
    inside, beyond = (np.ceil(edge - 0.5 - shifts).astype(np.int16)[:, None] for edge in (0, width))
    places = np.arange(width, dtype=np.int16)
    _fill_outside(moved, (places < inside) | (places >= beyond), fill)
    return moved


def _window(x: Planes, axis: int, start: int, size: int) -> Planes:
    """Return `size` pixels along the axis from `start` on; beyond the border its last pixel is repeated."""
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


def _weighted_sum(levels: Planes, weights: Sequence[Any], axis: int) -> Planes:
    """Sum over neighbors along the axis, truncating levels as Pillow does."""
    length = levels.shape[axis] - len(weights) + 1
    if len(weights) == 2:
        return _blend_two(levels[_along(axis, slice(0, length))], levels[_along(axis, slice(1, None))], weights[1])
    if is_small(levels):
        return _sum_in_numpy(levels.astype(np.float32), weights, axis, length)
    pixels = torch.from_numpy(levels.astype(np.float32))
    factors = [torch.as_tensor(weight, dtype=torch.float32) for weight in weights]
    out = pixels.narrow(axis, 0, length) * factors[0]
    for i in range(1, len(weights)):
        out.addcmul_(pixels.narrow(axis, i, length), factors[i])
    return out.clamp_(0, 255).numpy().astype(np.uint8)


def _sum_in_numpy(pixels: npt.NDArray[np.float32], weights: Sequence[Any], axis: int, length: int) -> Planes:
    """Sum in numpy, which is faster than torch for few pixels."""
    out = pixels[_along(axis, slice(0, length))] * np.float32(weights[0])
    for i in range(1, len(weights)):
        out += pixels[_along(axis, slice(i, i + length))] * np.float32(weights[i])
    out += np.float32(1e-4)  # Rounding must not turn 255 into 254.99999, which would be truncated.
    np.minimum(out, np.float32(255), out=out)
    return np.maximum(out, np.float32(0), out=out).astype(np.uint8)


def _blend_two(x: Planes, y: Planes, fraction: Any) -> Planes:
    """Blend `x` and a fraction of `y` in units of 1/256, because small integers are faster."""
    weight = np.rint(np.asarray(fraction) * 256).astype(np.uint16)
    out = x.astype(np.uint16)
    out *= np.uint16(256) - weight
    out += y * weight
    out >>= np.uint16(8)
    return out.astype(np.uint8)


def _along(axis: int, part: Any) -> tuple[Any, ...]:
    """Return the index of a part along the axis."""
    return (slice(None),) * axis + (part,)


def _weights(d: Any, bicubic: bool) -> tuple[Sequence[Any], int]:
    """Return the weights of the pixels around a place `d` (0 to 1) after a pixel, and the offset of the first.

    Bicubic is cubic convolution with a = -1, as in Pillow's transforms (its resizing has -0.5).
    """
    e = 1 - d
    if not bicubic:
        return (e, d), 0
    return (-d * e**2, d**3 - 2 * d**2 + 1, e**3 - 2 * e**2 + 1, -e * d**2), -1


def _fill_outside(x: Planes, outside: npt.NDArray[np.bool_], fill: Planes) -> None:
    for plane, level in zip(x, fill, strict=True):
        np.copyto(plane, level, where=outside)


def _by_pillow(x: Planes, matrix: tuple[float, ...], bicubic: bool, fill: Planes) -> Planes:
    """Apply the affine transform that takes the pixel at (x, y) from `matrix @ (x, y, 1)`."""
    size, resample = (x.shape[2], x.shape[1]), Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    if len(x) == 3:
        image = Image.frombytes("RGB", size, x.transpose(1, 0, 2).tobytes(), "raw", _ROWS_OF_PLANES, 0, 1)
        moved = image.transform(size, Image.Transform.AFFINE, matrix, resample, fillcolor=tuple(fill.tolist()))
        rows = np.frombuffer(moved.tobytes("raw", _ROWS_OF_PLANES), np.uint8)
        return np.ascontiguousarray(rows.reshape(x.shape[1], 3, x.shape[2]).transpose(1, 0, 2))
    planes = [
        Image.fromarray(plane).transform(size, Image.Transform.AFFINE, matrix, resample, fillcolor=level)
        for plane, level in zip(x, fill.tolist(), strict=True)
    ]
    return np.stack([np.asarray(plane) for plane in planes])


def rotate(x: Planes, degrees: float, bicubic: bool, fill: Planes) -> Planes:
    """Rotate counterclockwise about the center."""
    _, height, width = x.shape
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    if is_small(x):
        x0, y0 = width / 2, height / 2
        return _by_pillow(x, (cos, -sin, x0 - cos * x0 + sin * y0, sin, cos, y0 - sin * x0 - cos * y0), bicubic, fill)
    # Twice the distance from the center, in pixels.
    across = torch.arange(1 - width, width, 2, dtype=torch.float32)
    down = torch.arange(1 - height, height, 2, dtype=torch.float32)[:, None]
    # Source of each pixel; -1 to 1 is the image from edge to edge.
    grid = torch.empty(height, width, 2)
    torch.add(across * (cos / width), down * (-sin / width), out=grid[:, :, 0])
    torch.add(across * (sin / height), down * (cos / height), out=grid[:, :, 1])
    # Outside is 0, so levels are relative to the fill levels.
    base = torch.from_numpy(fill.astype(np.float32)).view(-1, 1, 1)
    pixels = torch.from_numpy(x.astype(np.float32)).sub_(base)
    mode = "bicubic" if bicubic else "bilinear"
    out = grid_sample(pixels[None], grid[None], mode, padding_mode="zeros", align_corners=False)[0]
    return out.add_(base).clamp_(0, 255).to(torch.uint8).numpy()
