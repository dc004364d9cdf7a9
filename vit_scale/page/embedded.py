"""Images inside the page, as small as they can be without a visible loss."""

from __future__ import annotations

import base64
import io
import warnings

from PIL import Image

SMALL = 40_000
"""Bytes up to which a file is embedded unchanged."""
MAX_SIDE = 1600
"""Pixels; larger images are reduced."""
QUALITY = 85


def image_url(content: bytes) -> tuple[str, int | None]:
    """Return a PNG file as a data URL, re-encoded as WebP if that is smaller, and the width of the image in pixels."""
    kind, width = "png", None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content))
        width = image.width
        if len(content) > SMALL:
            image.thumbnail((MAX_SIDE, MAX_SIDE))
            width = image.width
            if len(smaller := _as_webp(image)) < len(content):
                kind, content = "webp", smaller
    except (OSError, ValueError, KeyError, SyntaxError, Image.DecompressionBombError):
        pass  # An unreadable image, or a Pillow without WebP: the browser is shown the file.
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}", width


def _as_webp(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.convert("RGBA" if image.mode in ("RGBA", "LA", "PA") else "RGB").save(file, "WEBP", quality=QUALITY, method=4)
    return file.getvalue()
