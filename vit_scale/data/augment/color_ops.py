"""Color operations on one image, identical to Pillow's, on planes [C, H, W] of uint8."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

Planes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_LEVELS = np.arange(256)
_FLOAT_LEVELS = _LEVELS.astype(np.float32)
_FULL_LEVELS = _LEVELS.astype(np.float64)


def is_small(x: Planes) -> bool:
    """Return whether the overhead of a call exceeds its work on the pixels: then the fewest calls are the fastest."""
    return x.shape[1] * x.shape[2] <= 64 * 64


def auto_contrast(x: Planes) -> Planes:
    """Stretch each channel to the full range."""
    flat = x.reshape(len(x), -1)
    tables = []
    for low, high in zip(flat.min(axis=1).tolist(), flat.max(axis=1).tolist(), strict=True):
        scale = 255 / max(high - low, 1)
        # Levels outside low..high are never looked up.
        tables.append(_FULL_LEVELS * scale - low * scale if high > low else _FULL_LEVELS)
    return _look_up(x, np.array(tables).astype(np.int64))


def equalize(x: Planes) -> Planes:
    """Flatten the histogram of each channel."""
    histograms = _histograms(x)
    before = np.cumsum(histograms, axis=1) - histograms
    tables = []
    for counts, highest in zip(before, x.reshape(len(x), -1).max(axis=1).tolist(), strict=True):
        # The pixels below the highest level, spread evenly over 255 steps; too few of them change nothing.
        step = int(counts[highest]) // 255
        tables.append((counts + step // 2) // step if step else _LEVELS)
    return _look_up(x, np.minimum(tables, 255))


def _histograms(x: Planes) -> npt.NDArray[np.int64]:
    """Return histograms [C, 256]; large images are counted by Pillow, in 32 bits."""
    if not is_small(x):
        return np.array([_as_image(plane).histogram() for plane in x])
    levels = x.reshape(len(x), -1) + 256 * np.arange(len(x))[:, None]
    return np.bincount(levels.ravel(), minlength=256 * len(x)).reshape(-1, 256)


def invert(x: Planes) -> Planes:
    """Return the negative."""
    return np.uint8(255) - x


def posterize(x: Planes, bits: int) -> Planes:
    """Keep the highest bits of each level; zero bits give black."""
    return x if bits >= 8 else x & np.uint8(256 - (1 << (8 - max(bits, 0))) & 255)


def solarize(x: Planes, threshold: int) -> Planes:
    """Invert all levels from the threshold on."""
    if threshold > 255:
        return x
    return x ^ ((x >= np.uint8(max(threshold, 0))).view(np.uint8) * np.uint8(255))


def solarize_add(x: Planes, amount: int) -> Planes:
    """Brighten the dark half of the levels."""
    return _look_up(x, np.where(_LEVELS < 128, np.minimum(_LEVELS + amount, 255), _LEVELS))


def brightness(x: Planes, factor: float) -> Planes:
    """Change brightness: factor 0 is black, 1 the image."""
    return _look_up(x, _blend(np.float32(0), _FLOAT_LEVELS, factor))


def contrast(x: Planes, factor: float) -> Planes:
    """Change contrast: factor 0 is the mean luminance everywhere, 1 the image."""
    sums = x.reshape(len(x), -1).sum(axis=1, dtype=np.uint64)
    mean = np.float32(int(float(_luminance_weights(len(x)) @ sums) / x[0].size + 0.5))
    return _look_up(x, _blend(mean, _FLOAT_LEVELS, factor))


def saturation(x: Planes, factor: float) -> Planes:
    """Change saturation: factor 0 is grayscale, 1 the image."""
    image = x.astype(np.float32)
    return _blend(_luminance(image), image, factor)


def grayscale(x: Planes) -> Planes:
    """Return the luminance as one plane [1, H, W]."""
    return _luminance(x.astype(np.float32)).astype(np.uint8)


def _luminance(image: Floats) -> Floats:
    """Return Pillow's fixed-point luminance, exact in float32; the mean unless there are three channels."""
    if len(image) != 3:
        return np.floor(image.mean(axis=0, keepdims=True))
    gray = image[:1] * np.float32(19595)
    gray += image[1:2] * np.float32(38470)
    gray += image[2:] * np.float32(7471)
    gray += np.float32(0x8000)
    gray *= np.float32(1 / 0x10000)
    return np.floor(gray, out=gray)


def sharpness(x: Planes, factor: float) -> Planes:
    """Change sharpness: factor 0 is smoothed by 3x3 pixels, 1 the image, more is sharpened; the border is unchanged."""
    if min(x.shape[1:]) < 3:
        return x
    wide = x.astype(np.int16)
    rows = wide[:, :-2] + wide[:, 1:-1]
    rows += wide[:, 2:]
    center = wide[:, 1:-1, 1:-1]
    sums = rows[:, :, :-2] + rows[:, :, 1:-1]
    sums += rows[:, :, 2:]
    sums += center << 2
    smooth = sums.astype(np.float32)
    smooth *= np.float32(1 / 13)
    smooth += np.float32(0.5)
    np.floor(smooth, out=smooth)
    out = x.copy()
    out[:, 1:-1, 1:-1] = _blend(smooth, center.astype(np.float32), factor)
    return out


def blur(x: Planes, radius: float) -> Planes:
    """Apply Gaussian blur."""
    return np.stack([np.asarray(_as_image(plane).filter(ImageFilter.GaussianBlur(radius))) for plane in x])


def _as_image(plane: Planes) -> Image.Image:
    """Return a view of one plane."""
    height, width = plane.shape
    return Image.frombuffer("L", (width, height), plane, "raw", "L", 0, 1)


def _blend(degenerate: Floats | np.float32, image: Floats, factor: float) -> Planes:
    """Interpolate from the degenerate image (factor 0) to the image (factor 1), truncating levels as Pillow does."""
    mixed = np.subtract(image, degenerate)
    mixed *= np.float32(factor)
    mixed += degenerate
    if not 0 <= factor <= 1:
        np.clip(mixed, 0, 255, out=mixed)
    return mixed.astype(np.uint8)


def _luminance_weights(channels: int) -> npt.NDArray[np.float64]:
    return np.array([0.299, 0.587, 0.114]) if channels == 3 else np.full(channels, 1 / channels)


def _look_up(x: Planes, table: npt.NDArray[np.integer]) -> Planes:
    """Map each level through a table [256] for all channels, or [C, 256]."""
    table = table.astype(np.uint8)
    if table.ndim == 1:
        return np.frombuffer(x.tobytes().translate(table.tobytes()), np.uint8).reshape(x.shape)
    planes = [plane.tobytes().translate(levels.tobytes()) for plane, levels in zip(x, table, strict=True)]
    return np.frombuffer(b"".join(planes), np.uint8).reshape(x.shape)
