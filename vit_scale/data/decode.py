"""From the bytes of a file to an image of the channels that the model takes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, ImageOps


def open_image(data: Any) -> Image.Image:
    """The stored image as Pillow sees it."""
    if isinstance(data, np.ndarray):
        return Image.fromarray(data)
    return Image.open(data if isinstance(data, str) else io.BytesIO(data))


def count_channels(data: Any) -> int:
    """1 for grayscale, 3 for colour, or the channels of an array."""
    if isinstance(data, np.ndarray):
        return 1 if data.ndim == 2 else data.shape[-1]
    return 1 if open_image(data).mode in ("1", "L", "LA", "I", "I;16", "F") else 3


def decode(data: Any, in_chans: int) -> Image.Image:
    """Decode to RGB or grayscale, upright."""
    image = ImageOps.exif_transpose(open_image(data))
    return image.convert("L" if in_chans == 1 else "RGB")
