"""Decode stored images of any kind to pixels, as a viewer would show them.

Images are upright by their EXIF orientation; animations give their first frame; transparency is shown over white; 16
bits are scaled to 8; CMYK and palettes become colors. JPEG takes a fast path; everything else, and every unusual JPEG,
is decoded by Pillow.
"""

from __future__ import annotations

import io
import warnings
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from vit_scale.data.images import jpeg
from vit_scale.data.images.jpeg import Box, Pixels
from vit_scale.errors import UserError

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_GRAY_MODES = ("1", "L", "I", "F", "LA", "La")
_MAX_PIXELS = 89_478_485
"""Most pixels that are decoded, Pillow's own threshold: 256 MB in color."""
# Views that make an image of EXIF orientation 2..8 upright.
_UPRIGHT = {
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x[::-1].swapaxes(0, 1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x[:, ::-1].swapaxes(0, 1),
}


class UnreadableImage(Exception):
    """An image that cannot be decoded. The message has the reason; the caller adds the name of the image."""


class LazyImage(Protocol):
    """An open image: its size is known, its pixels are decoded on demand."""

    height: int
    width: int

    def crop(self, box: Box, needed: tuple[float, float]) -> Pixels:
        """Return pixels [h, w, C] of the box, possibly at a smaller scale, but at least of the needed height and width
        (unless the box itself is smaller)."""


def open_image(data: Any, channels: int) -> LazyImage:
    """Open bytes, a path, pixels or a Pillow image as `channels` channels. `crop` may still raise UnreadableImage."""
    if isinstance(data, Image.Image):
        return ArrayImage(decode_with_pillow(data, channels))
    if isinstance(data, np.ndarray):
        if data.size == 0:
            raise UnreadableImage("has no pixels")
        return ArrayImage(to_channels(to_uint8(data), channels))
    if isinstance(data, str):
        try:
            with open(data, "rb") as file:
                data = file.read()
        except OSError as error:
            raise UnreadableImage(f"cannot be read: {error.strerror}") from error
    view = memoryview(data).cast("B")
    small = jpeg.decode_small(view, channels) if channels in (1, 3) else None
    if small is not None:
        return ArrayImage(small)
    header = jpeg.read_header(view) if channels in (1, 3) else None
    if header is not None and header.components in (1, 3):
        return JpegImage(view, header, channels)
    return ArrayImage(decode_with_pillow(view, channels))


def count_channels(data: Any) -> int:
    """Return 1 for grayscale, 3 for color, or the channels of an array. Raises UnreadableImage."""
    if isinstance(data, np.ndarray):
        return 1 if data.ndim == 2 else channels_last(data).shape[-1]
    try:
        with _open(data if isinstance(data, str) else io.BytesIO(data)) as image:
            return 1 if image.mode in _GRAY_MODES or image.mode.startswith("I;16") else 3
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnreadableImage(str(error)) from error


class ArrayImage:
    """Pixels [H, W, C] in memory."""

    def __init__(self, pixels: Pixels):
        self.pixels = pixels
        self.height, self.width = pixels.shape[:2]

    def crop(self, box: Box, needed: tuple[float, float]) -> Pixels:
        """Return a view of the box."""
        left, top, right, bottom = box
        return self.pixels[top:bottom, left:right]


class JpegImage:
    """A JPEG file in grayscale or color."""

    def __init__(self, data: memoryview, header: jpeg.JpegHeader, channels: int):
        self.data, self.header, self.channels = data, header, channels
        self.orientation = jpeg.orientation(data) if header.has_exif else 1
        self.height, self.width = header.height, header.width
        if self.orientation >= 5:
            self.height, self.width = self.width, self.height

    def crop(self, box: Box, needed: tuple[float, float]) -> Pixels:
        """Decode the box at the smallest scale that has the needed size."""
        left, top, right, bottom = box
        factor = jpeg.reduction((bottom - top, right - left), needed)
        while factor < 8 and self.height * self.width > _MAX_PIXELS * factor**2:
            factor *= 2
        if self.orientation == 1:
            return self._decode(box, factor)
        full = self._decode((0, 0, self.header.width, self.header.height), factor)
        upright = _UPRIGHT[self.orientation](full)
        return upright[top // factor : -(-bottom // factor), left // factor : -(-right // factor)]

    def _decode(self, box: Box, factor: int) -> Pixels:
        try:
            return jpeg.decode_box(self.data, self.header, box, factor, self.channels)
        except ValueError:
            # Pillow tolerates harmless faults and detects the others.
            left, top, right, bottom = box
            pixels = decode_with_pillow(self.data, self.channels, upright=False)[top:bottom, left:right]
            return pixels[::factor, ::factor]


def decode_with_pillow(data: memoryview | Image.Image, channels: int, upright: bool = True) -> Pixels:
    """Return pixels [H, W, C] of any file that Pillow reads, or of an image that it has opened."""
    try:
        with warnings.catch_warnings():
            # Large images, odd EXIF data and palettes with transparency are all handled here.
            warnings.simplefilter("ignore")
            # The caller's image is not modified.
            image = ImageOps.exif_transpose(data) if isinstance(data, Image.Image) else _open(io.BytesIO(data))
            if upright:
                ImageOps.exif_transpose(image, in_place=True)
            return np.atleast_3d(np.asarray(_convert(image, channels)))
    except Image.DecompressionBombError as error:
        raise UnreadableImage(f"too large: {error}") from error
    except UnidentifiedImageError as error:
        is_heif = not isinstance(data, Image.Image) and bytes(data[4:8]) == b"ftyp"
        why = "HEIC requires pillow-heif" if is_heif else "not an image, or corrupt from the first bytes on"
        raise UnreadableImage(f"cannot be decoded: {why}") from error
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders raise nearly anything for corrupt files
        raise UnreadableImage(f"cannot be decoded: {error or type(error).__name__}") from error


def _open(file: str | io.BytesIO) -> Image.Image:
    try:
        return Image.open(file)
    except UnidentifiedImageError:
        if not _register_heif():
            raise
        return Image.open(file)


@cache
def _register_heif() -> bool:
    """Let Pillow read HEIC files, if pillow-heif is installed; in each process, when it first meets an unknown file."""
    try:
        import pillow_heif  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _convert(image: Image.Image, channels: int) -> Image.Image:
    mode = _MODES.get(channels)
    if mode is None:
        raise UserError(f"model.in_chans={channels}: image files have 1, 3 or 4 channels; use an array column")
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = Image.fromarray(to_uint8(np.asarray(image)))
    if mode != "RGBA" and (image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info):
        image = image.convert("RGBA")
        page = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(page, image)
    return image.convert(mode)


def to_uint8(pixels: npt.NDArray[Any]) -> Pixels:
    """Convert any range of numbers to 0..255: 16 bits are scaled down, fractions of 1 scaled up."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * np.uint8(255)
    top = float(np.nanmax(pixels)) if pixels.size else 0.0
    if pixels.dtype == np.uint16 or (pixels.dtype.kind in "iu" and top > 255):
        scale = 255 / 65535
    elif pixels.dtype.kind == "f" and top <= 1:
        scale = 255.0
    else:
        scale = 1.0
    return np.clip(np.rint(np.nan_to_num(pixels.astype(np.float64)) * scale), 0, 255).astype(np.uint8)


def channels_last(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return [H, W, C] from [H, W], [H, W, C] or [C, H, W]: the shorter of the two ends is the channels."""
    if pixels.ndim == 2:
        return pixels[:, :, None]
    return pixels.transpose(1, 2, 0) if pixels.shape[0] < pixels.shape[-1] else pixels


def to_channels(pixels: Pixels, channels: int) -> Pixels:
    """Return [H, W, channels]: grayscale is repeated, color converted to grayscale; other changes are an error."""
    pixels = channels_last(pixels)
    have = pixels.shape[-1]
    if have == channels:
        return pixels
    if have == 1:
        return np.repeat(pixels, channels, axis=2)
    if have == 3 and channels == 1:
        return np.atleast_3d(np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).convert("L")))
    raise UserError(f"model.in_chans={channels}: the images have {have} channels")
