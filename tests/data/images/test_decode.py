"""Decoding of all kinds of image files."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit_scale.data.images.decode import UnreadableImage, count_channels, open_image, to_channels, to_uint8
from vit_scale.errors import UserError

Encode = Callable[..., bytes]


def decode(data: object, channels: int = 3) -> np.ndarray:
    """Return the full image."""
    image = open_image(data, channels)
    return image.crop((0, 0, image.width, image.height), (image.height, image.width))


@pytest.mark.parametrize("kind", ["png", "webp", "bmp", "tiff", "gif", "ppm"])
def test_all_formats_are_decoded(kind: str, photographs: list[np.ndarray], encode: Encode) -> None:
    options = {"lossless": True} if kind == "webp" else {}
    decoded = decode(encode(photographs[0], kind, **options))
    assert decoded.shape == (224, 224, 3)
    if kind != "gif":  # 256 colors
        assert np.array_equal(decoded, photographs[0])


def test_jpeg_matches_pillow(photographs: list[np.ndarray], encode: Encode) -> None:
    for options in (
        {"quality": 95},
        {"quality": 75, "subsampling": 2},
        {"progressive": True},
        {"restart_marker_rows": 1},
    ):
        data = encode(photographs[1], "jpeg", **options)
        reference = np.asarray(Image.open(io.BytesIO(data)))
        assert np.abs(decode(data).astype(int) - reference).max() <= 2, options


def test_every_stored_form_decodes_the_same(photographs: list[np.ndarray], encode: Encode, tmp_path: Path) -> None:
    import pyarrow

    data = encode(photographs[0], "png")
    (tmp_path / "a.png").write_bytes(data)
    for form in (data, memoryview(data), pyarrow.py_buffer(data), str(tmp_path / "a.png"), photographs[0]):
        assert np.array_equal(decode(form), photographs[0])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_exif_rotation_is_undone(orientation: int, kind: str, photographs: list[np.ndarray], encode: Encode) -> None:
    upright = Image.fromarray(photographs[0][:128, :96])
    turn = {
        2: [Image.Transpose.FLIP_LEFT_RIGHT],
        3: [Image.Transpose.ROTATE_180],
        4: [Image.Transpose.FLIP_TOP_BOTTOM],
        5: [Image.Transpose.TRANSPOSE],
        6: [Image.Transpose.ROTATE_90],
        7: [Image.Transpose.TRANSVERSE],
        8: [Image.Transpose.ROTATE_270],
    }
    stored = upright
    for transpose in turn.get(orientation, []):
        stored = stored.transpose(transpose)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(stored, kind, exif=exif, **({"quality": 98, "subsampling": 0} if kind == "jpeg" else {}))
    image = open_image(data, 3)
    assert (image.height, image.width) == (128, 96)
    assert np.abs(decode(data).astype(int) - np.asarray(upright)).mean() < 2
    box = (10, 20, 70, 100)
    part = image.crop(box, (80, 60)).astype(int)
    assert np.abs(part - np.asarray(upright)[20:100, 10:70]).mean() < 2


def test_cmyk_is_converted_to_colors(photographs: list[np.ndarray], encode: Encode) -> None:
    data = encode(Image.fromarray(photographs[2]).convert("CMYK"), "jpeg", quality=98)
    assert count_channels(data) == 3
    assert np.abs(decode(data).astype(int) - photographs[2]).mean() < 3


def test_16_bits_are_scaled_to_8(encode: Encode) -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    for kind in ("png", "tiff"):
        data = encode(ramp, kind)
        assert count_channels(data) == 1
        assert np.array_equal(decode(data, 1)[..., 0].ravel(), np.arange(256))
        assert np.array_equal(decode(data, 3), np.repeat(decode(data, 1), 3, axis=2))


def test_transparency_is_shown_over_white(encode: Encode) -> None:
    # Under the transparent half is black, as most programs leave it.
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:, 2:] = (200, 10, 10, 255)
    image = Image.fromarray(pixels)
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE)
    for data in (encode(image, "png"), encode(image, "webp", lossless=True)):
        assert decode(data)[0, 0].tolist() == [255, 255, 255]
        assert decode(data)[0, 3].tolist() == [200, 10, 10]
    indexed = Image.fromarray(np.array([[0, 1]], np.uint8), mode="P")
    indexed.putpalette([0, 0, 0, 200, 10, 10])
    assert decode(encode(indexed, "png", transparency=0))[0].tolist() == [[255, 255, 255], [200, 10, 10]]
    assert decode(encode(palette, "png")).shape == (4, 4, 3)
    gray = Image.fromarray(np.array([[[0, 0], [90, 255]]], np.uint8), mode="LA")
    assert decode(encode(gray, "png"), 1)[0, :, 0].tolist() == [255, 90]


def test_one_pixel_and_two_colors(encode: Encode) -> None:
    assert decode(encode(np.full((1, 1, 3), 77, np.uint8), "png")).tolist() == [[[77, 77, 77]]]
    assert decode(encode(np.full((1, 1, 3), 77, np.uint8), "jpeg")).shape == (1, 1, 3)
    bilevel = encode(Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1"), "png")
    assert decode(bilevel, 1)[0, :, 0].tolist() == [0, 255]


def test_animation_gives_its_first_frame(encode: Encode) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    for kind in ("gif", "webp"):
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert np.abs(decode(data)[4, 4].astype(int) - [255, 0, 0]).max() <= 1


def test_grayscale_and_color_are_converted_to_the_channels_of_the_model(
    photographs: list[np.ndarray], encode: Encode
) -> None:
    gray = np.asarray(Image.fromarray(photographs[0]).convert("L"))
    for kind in ("jpeg", "png"):
        options = {"quality": 98, "subsampling": 0} if kind == "jpeg" else {}
        assert decode(encode(gray, kind, **options), 3).shape == (224, 224, 3)
        as_gray = decode(encode(photographs[0], kind, **options), 1)
        assert np.abs(as_gray[..., 0].astype(int) - gray).mean() < 1.5
        assert count_channels(encode(gray, kind, **options)) == 1
    with_alpha = decode(encode(photographs[0], "png"), 4)
    assert with_alpha.shape == (224, 224, 4)
    assert np.all(with_alpha[..., 3] == 255)


def test_arrays_with_many_channels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 5), dtype=np.uint8)
    assert np.array_equal(decode(pixels, 5), pixels)
    assert np.array_equal(decode(pixels.transpose(2, 0, 1), 5), pixels), "channels may come first"
    assert count_channels(pixels) == 5
    with pytest.raises(UserError, match="model.in_chans=3: the images have 5 channels"):
        to_channels(pixels, 3)


def test_any_range_is_converted_to_levels() -> None:
    assert to_uint8(np.array([0.0, 0.5, 1.0])).tolist() == [0, 128, 255]
    assert to_uint8(np.array([0.0, 127.4, 255.0])).tolist() == [0, 127, 255]
    assert to_uint8(np.array([0, 65535], np.uint16)).tolist() == [0, 255]
    assert to_uint8(np.array([0, 65535], np.int32)).tolist() == [0, 255]
    assert to_uint8(np.array([0, 200], np.int64)).tolist() == [0, 200]
    assert to_uint8(np.array([False, True])).tolist() == [0, 255]
    assert to_uint8(np.array([np.nan, -5.0, 300.0])).tolist() == [0, 0, 255]


def corrupt_files(photograph: np.ndarray, encode: Encode) -> dict[str, bytes]:
    jpeg, png = encode(photograph, "jpeg", quality=90), encode(photograph, "png")
    return {
        "empty": b"",
        "text": b"not an image",
        "truncated jpeg": jpeg[: len(jpeg) // 2],
        "jpeg without its end": jpeg[:-30],
        "jpeg header alone": jpeg[:200],
        "truncated png": png[: len(png) // 2],
        "jpeg of no height": jpeg.replace(struct.pack(">HH", 224, 224), struct.pack(">HH", 0, 224), 1),
        "zeros": bytes(5000),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "text",
        "truncated jpeg",
        "jpeg without its end",
        "jpeg header alone",
        "truncated png",
        "jpeg of no height",
        "zeros",
    ],
)
def test_corrupt_files_are_unreadable(kind: str, photographs: list[np.ndarray], encode: Encode) -> None:
    data = corrupt_files(photographs[0], encode)[kind]
    with pytest.raises(UnreadableImage):
        decode(data)


def test_truncated_jpeg_is_found_even_if_the_crop_is_above_the_damage(
    photographs: list[np.ndarray], encode: Encode
) -> None:
    data = corrupt_files(photographs[0], encode)["truncated jpeg"]
    with pytest.raises(UnreadableImage):
        open_image(data, 3).crop((0, 0, 64, 32), (32, 32))


def test_harmless_faults_are_tolerated(photographs: list[np.ndarray], encode: Encode) -> None:
    data = encode(photographs[0], "jpeg", quality=90)
    padded = data[:-2] + b"\x00\x00\x00" + data[-2:] + b"camera junk"
    assert np.array_equal(decode(padded), decode(data))


def test_missing_file_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage, match="No such file"):
        open_image(str(tmp_path / "gone.jpg"), 3)


def test_huge_images(encode: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JPEG of 100 million pixels is decoded at a smaller scale; other formats are rejected."""
    huge = encode(Image.new("L", (12_000, 9_000), 99), "jpeg")
    image = open_image(huge, 3)
    assert (image.height, image.width) == (9_000, 12_000)
    pixels = image.crop((0, 0, 12_000, 9_000), (224, 224))
    assert pixels.shape == (1125, 1500, 3)
    assert np.all(pixels == 99)
    assert image.crop((11_000, 8_000, 11_400, 8_400), (224, 224)).shape[0] >= 200
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UnreadableImage, match="too large"):
        decode(encode(Image.new("L", (100, 100)), "png"))
