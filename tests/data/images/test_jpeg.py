"""JPEG files are decoded only as far, and at as small a scale, as a crop needs."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from vit_scale.data.images import jpeg

Encode = Callable[..., bytes]
OPTIONS = [
    {"quality": 95, "subsampling": 0},
    {"quality": 80, "subsampling": 1},
    {"quality": 80, "subsampling": 2},
    {"quality": 90, "restart_marker_rows": 1},
    {"quality": 90, "progressive": True},
    {"quality": 90, "optimize": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_crop_equals_crop_of_the_full_image(
    options: dict, channels: int, photographs: list[np.ndarray], encode: Encode
) -> None:
    data = memoryview(encode(photographs[1][:210, :190], "jpeg", **options))
    header = jpeg.read_header(data)
    assert header is not None
    assert (header.height, header.width) == (210, 190)
    assert header.stops_early == ("progressive" not in options)
    full = simplejpeg.decode_jpeg(data, {1: "GRAY", 3: "RGB"}[channels])
    rng = np.random.default_rng(0)
    for _ in range(20):
        top, left = rng.integers(0, 200), rng.integers(0, 180)
        bottom, right = rng.integers(top + 1, 211), rng.integers(left + 1, 191)
        box = (int(left), int(top), int(right), int(bottom))
        assert np.array_equal(jpeg.decode_box(data, header, box, 1, channels), full[top:bottom, left:right])


def test_rows_below_the_crop_are_not_decoded(
    photographs: list[np.ndarray], encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = memoryview(encode(photographs[0], "jpeg"))
    decoded = []
    original = simplejpeg.decode_jpeg

    def note(*args, **options):
        decoded.append(original(*args, **options))
        return decoded[-1]

    monkeypatch.setattr(simplejpeg, "decode_jpeg", note)
    jpeg.decode_box(data, jpeg.read_header(data), (0, 0, 50, 40), 1, 3)
    assert decoded[0].shape[0] == 48


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("options", OPTIONS)
def test_reduced_crop_is_close_to_the_resized_crop(
    factor: int, options: dict, photographs: list[np.ndarray], encode: Encode
) -> None:
    data = memoryview(encode(photographs[0], "jpeg", **options))
    box = (32, 64, 160, 192)
    reduced = jpeg.decode_box(data, jpeg.read_header(data), box, factor, 3)
    assert reduced.shape == (128 // factor, 128 // factor, 3)
    crop = Image.open(io.BytesIO(data)).crop(box).resize((128 // factor, 128 // factor), Image.Resampling.BOX)
    assert np.abs(reduced.astype(int) - np.asarray(crop)).mean() < 3


@pytest.mark.parametrize(
    ("box", "needed", "factor"),
    [
        ((447, 500), (224, 224), 1),
        ((448, 448), (224, 224), 2),
        ((900, 460), (224, 224), 2),
        ((1800, 1800), (224, 224), 8),
    ],
)
def test_reduction_never_goes_below_the_needed_size(box: tuple, needed: tuple, factor: int) -> None:
    assert jpeg.reduction(box, needed) == factor


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8", b"\xff\xd8\xff\xe0\x00\x10" + bytes(20), b"PNG...............", bytes(100)]
)
def test_other_files_have_no_header(data: bytes) -> None:
    assert jpeg.read_header(memoryview(data)) is None


def test_unreadable_exif_means_upright(photographs: list[np.ndarray], encode: Encode) -> None:
    data = encode(photographs[0], "jpeg", exif=b"Exif\x00\x00 corrupt")
    header = jpeg.read_header(memoryview(data))
    assert header is not None
    assert header.has_exif
    assert jpeg.orientation(memoryview(data)) == 1
