"""Decode JPEG files with libjpeg-turbo: only as many rows, and at as small a scale, as a crop needs.

A JPEG is decoded from the top. The rows below a crop need not be decoded at all: the height in the header is lowered to
the lower edge of the crop, and the decoder stops there. A crop that will be resized to half or less is decoded at 1/2,
1/4 or 1/8 of the scale by shorter inverse transforms.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""left, top, right, bottom"""

_START = b"\xff\xd8"
_SMALL_FILE = 4096
_ROW_BLOCK = 16  # Rows of the largest block of samples coded together.
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL = (0xC0, 0xC1)
_APP1, _START_OF_SCAN = 0xE1, 0xDA
_ORIENTATION_TAG = 0x0112
_COLORSPACES = {1: "GRAY", 3: "RGB"}


@dataclass(frozen=True)
class JpegHeader:
    """Contents of the markers before the first scan."""

    height: int
    width: int
    height_at: int
    """Offset of the two height bytes."""
    components: int
    has_exif: bool
    stops_early: bool
    """Whether all components are in one sequential scan, so that rows are complete as soon as they are read."""


def read_header(data: memoryview) -> JpegHeader | None:
    """Return the header of a JPEG file; None if it is not a JPEG or is corrupt before its first scan."""
    if len(data) < 4 or data[0] != 0xFF or data[1] != 0xD8:
        return None
    at, has_exif = 2, False
    frame: tuple[int, int] | None = None
    while at + 9 < len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], (data[at + 2] << 8) | data[at + 3]
        if marker == 0xFF:  # Fill byte.
            at += 1
            continue
        if marker == _APP1 and bytes(data[at + 4 : at + 8]) == b"Exif":
            has_exif = True
        elif marker in _START_OF_FRAME:
            frame = marker, at
        elif marker == _START_OF_SCAN:
            return _header(data, frame, data[at + 4], has_exif)
        at += 2 + length
    return None


def _header(data: memoryview, frame: tuple[int, int] | None, scan_components: int, has_exif: bool) -> JpegHeader | None:
    if frame is None:
        return None
    marker, at = frame
    height, width = (data[at + 5] << 8) | data[at + 6], (data[at + 7] << 8) | data[at + 8]
    components = data[at + 9]
    if height == 0 or width == 0:
        return None
    one_scan = marker in _SEQUENTIAL and scan_components == components
    return JpegHeader(height, width, at + 5, components, has_exif, one_scan)


def orientation(data: memoryview) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (upright) if it cannot be read."""
    try:
        value = Image.open(io.BytesIO(data)).getexif().get(_ORIENTATION_TAG, 1)
    except (OSError, ValueError, SyntaxError):
        return 1
    return value if value in range(1, 9) else 1


def reduction(box_size: tuple[int, int], needed: tuple[float, float]) -> int:
    """Return the largest of 8, 4, 2, 1 by which a box may be reduced and still have the needed height and width."""
    for factor in (8, 4, 2):
        if box_size[0] >= factor * needed[0] and box_size[1] >= factor * needed[1]:
            return factor
    return 1


def decode_box(data: memoryview, header: JpegHeader, box: Box, factor: int, channels: int) -> Pixels:
    """Return pixels [H, W, C] of the box, reduced by `factor`. Raises ValueError for a corrupt file."""
    left, top, right, bottom = box
    # One more row than the crop, because the last one may be blended with the next.
    height = -(-(bottom + 1) // _ROW_BLOCK) * _ROW_BLOCK
    file: memoryview | bytearray = data
    stops_early = header.stops_early and height < header.height and _is_complete(data)
    if stops_early:
        file = bytearray(data)
        file[header.height_at : header.height_at + 2] = height.to_bytes(2, "big")
    else:
        height = header.height
    size = {} if factor == 1 else {"min_height": -(-height // factor), "min_width": -(-header.width // factor)}
    # Not strict about the rows that remain after an early stop.
    pixels = simplejpeg.decode_jpeg(file, _COLORSPACES[channels], strict=not stops_early, **size)
    return pixels[top // factor : -(-bottom // factor), left // factor : -(-right // factor)]


def decode_small(data: memoryview, channels: int) -> Pixels | None:
    """Return pixels [H, W, C] of a file so small that its header takes longer to read than its pixels.

    Returns None if more must be known: other formats, rotated images, other color spaces, faults.
    """
    if len(data) > _SMALL_FILE or data[:2] != _START or b"Exif" in bytes(data):
        return None
    try:
        return simplejpeg.decode_jpeg(data, _COLORSPACES[channels], strict=True)
    except ValueError:
        return None


def _is_complete(data: memoryview) -> bool:
    """Return whether the file has its end marker: a truncated file must not pass because its end was not read."""
    return b"\xff\xd9" in bytes(data[-64:])
