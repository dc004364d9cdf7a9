"""One drawn geometry moves image, mask and boxes identically."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from vit_scale.config import AugmentConfig
from vit_scale.data.augment.geometry import GEOMETRY_SLOTS, Geometry, draw_geometry
from vit_scale.data.augment.transforms import EvalTransform, TrainTransform
from vit_scale.data.draws import uniforms
from vit_scale.data.images.decode import ArrayImage
from vit_scale.data.spatial_targets import IGNORE_INDEX, Boxes, BoxTarget, MaskTarget

SIZE = (24, 32)
MODES: dict[str, dict[str, Any]] = {
    "random_resized": {"crop": "random_resized", "crop_scale": (0.2, 1.0)},
    "padded": {"crop": "random", "crop_padding": 6, "crop_border": "black"},
    "reflected": {"crop": "random", "crop_padding": 6},
    "center": {"crop": "none"},
}
IMAGE_SIZES = [SIZE, (50, 60), (90, 40), (12, 300)]


def rows(count: int) -> list[list[float]]:
    return uniforms(0, np.arange(count), 80).tolist()


def transform(mode: str) -> TrainTransform:
    augment = AugmentConfig(**{"hflip": 0.5, "vflip": 0.5, "interpolation": "random"} | MODES[mode])
    return TrainTransform(augment, SIZE, (0.5,) * 3, (0.25,) * 3)


def scene(height: int, width: int) -> np.ndarray:
    """Return pixels [H, W, 3]: a bright rectangle off the center of a black image."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[height // 8 : height // 2, width // 4 : width * 7 // 8] = 200
    return pixels


def by_torchvision(x: Any, geometry: Geometry, interpolation: v2.InterpolationMode, fill: int) -> Any:
    """Apply the geometry with torchvision's public functions."""
    left, top, right, bottom = geometry.box
    x = v2.functional.crop(x, top, left, bottom - top, right - left)
    x = v2.functional.resize(x, list(geometry.resized), interpolation, antialias=True)
    x = v2.functional.pad(x, list(geometry.padding), fill=fill)
    x = v2.functional.horizontal_flip(x) if geometry.hflip else x
    return v2.functional.vertical_flip(x) if geometry.vflip else x


def edges(mask: np.ndarray) -> np.ndarray:
    """Return the pixels that differ from a neighbor."""
    padded = np.pad(mask, 1, mode="edge")
    height, width = mask.shape
    shifted = [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]
    return np.any([other != mask for other in shifted], axis=0)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("size", IMAGE_SIZES)
def test_image_and_mask_match_torchvision(mode: str, size: tuple[int, int]) -> None:
    train = transform(mode)
    pixels = np.random.default_rng(0).integers(0, 250, (*size, 3), dtype=np.uint8)
    planes = tv_tensors.Image(torch.from_numpy(pixels.transpose(2, 0, 1).copy()))
    for u in rows(25):
        geometry = train.geometry(size, u)
        # The mask is painted from the first channel of the image.
        nearest = by_torchvision(planes, geometry, v2.InterpolationMode.NEAREST_EXACT, IGNORE_INDEX)
        assert np.array_equal(MaskTarget().move(pixels[..., 0], geometry), nearest[0].numpy())
        if mode != "reflected":
            smooth = by_torchvision(planes, geometry, v2.InterpolationMode(geometry.filter), 0)
            ours = train.change([train.crop(ArrayImage(pixels), geometry)], [geometry], [u])[0]
            assert np.abs(ours.astype(int) - smooth.numpy()).max() <= 1


@pytest.mark.parametrize("mode", ["padded", "reflected", "center"])
def test_mask_is_pixel_exact_without_resampling(mode: str) -> None:
    train = transform(mode)
    pixels = np.random.default_rng(0).integers(0, 250, (*SIZE, 3), dtype=np.uint8)
    padded = 0
    for u in rows(60):
        geometry = train.geometry(SIZE, u)
        image = train.change([train.crop(ArrayImage(pixels), geometry)], [geometry], [u])[0]
        mask = MaskTarget().move(pixels[..., 0], geometry)
        inside = mask != IGNORE_INDEX
        padded += int((~inside).sum())
        assert np.array_equal(image[0][inside], mask[inside])
    assert (padded > 0) == (mode != "center")


@pytest.mark.parametrize("mode", [*MODES, "evaluation"])
@pytest.mark.parametrize("size", IMAGE_SIZES[:3])
def test_mask_and_boxes_stay_on_the_object(mode: str, size: tuple[int, int]) -> None:
    change: Any = EvalTransform(AugmentConfig(), SIZE) if mode == "evaluation" else transform(mode)
    pixels = scene(*size)
    height, width = size
    box = np.array([[width // 4, height // 8, width * 7 // 8, height // 2]], np.float32)
    met = 0
    for u in rows(40):
        geometry = change.geometry(size, u)
        image = change.crop(ArrayImage(pixels), geometry)[0]
        image = image[:: -1 if geometry.vflip else 1, :: -1 if geometry.hflip else 1]
        mask = MaskTarget().move((pixels[..., 0] > 0).astype(np.uint8), geometry)
        sure = (mask != IGNORE_INDEX) & ~edges(mask)
        assert np.array_equal(image[sure] > 100, mask[sure] == 1)
        moved = BoxTarget().move(Boxes(box, np.array([5])), geometry)
        found = np.argwhere(mask == 1)
        if len(moved.classes) == 0:
            assert len(found) == 0 or min(np.ptp(found, axis=0)) <= 1, "only slivers are dropped"
            continue
        met += 1
        (top, left), (bottom, right) = found.min(axis=0), found.max(axis=0) + 1
        assert np.abs(moved.corners[0] - [left, top, right, bottom]).max() <= 1
        assert moved.classes.tolist() == [5]
        assert moved.corners.dtype == np.float32
    assert met > 10


def test_boxes_match_torchvision() -> None:
    train = transform("random_resized")
    corners = np.array([[3, 4, 20.5, 30], [40, 10, 59, 49], [0, 0, 60, 50]], np.float32)
    for u in rows(40):
        geometry = train.geometry((50, 60), u)
        boxes = tv_tensors.BoundingBoxes(torch.from_numpy(corners), format="XYXY", canvas_size=(50, 60))
        left, top, right, bottom = geometry.box
        boxes = v2.functional.resized_crop(boxes, top, left, bottom - top, right - left, list(SIZE))
        boxes = v2.functional.horizontal_flip(boxes) if geometry.hflip else boxes
        boxes = v2.functional.vertical_flip(boxes) if geometry.vflip else boxes
        boxes, labels = v2.SanitizeBoundingBoxes(min_size=1.0)(v2.ClampBoundingBoxes()(boxes), torch.arange(3))
        moved = BoxTarget().move(Boxes(corners, np.arange(3)), geometry)
        assert moved.classes.tolist() == labels.tolist()
        np.testing.assert_allclose(moved.corners, boxes.numpy(), atol=1e-4)


def test_drawing_twice_from_one_row_is_the_same() -> None:
    augment = AugmentConfig(hflip=0.5, vflip=0.5)
    for u in rows(20):
        first = draw_geometry((50, 60), SIZE, augment, u)
        assert first == draw_geometry((50, 60), SIZE, augment, u[:GEOMETRY_SLOTS])
    assert len({draw_geometry((50, 60), SIZE, augment, u) for u in rows(20)}) == 20


def test_evaluation_draws_nothing() -> None:
    evaluation = EvalTransform(AugmentConfig(), SIZE)
    assert {evaluation.geometry((50, 60), u) for u in rows(5)} == {evaluation.geometry((50, 60))}


def test_resized_box_and_padding_give_the_size() -> None:
    for mode in MODES:
        for u in rows(10):
            geometry = transform(mode).geometry((50, 60), u)
            left, top, right, bottom = geometry.padding
            assert geometry.size == SIZE
            assert geometry.resized == (SIZE[0] - top - bottom, SIZE[1] - left - right)
            assert min(geometry.resized) > 0
