"""Crops, flips, color operations and erasing of one image; evaluation against timm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit_scale.config import AugmentConfig
from vit_scale.data.augment.erasing import RandomErasing, erased_box
from vit_scale.data.augment.geometry import random_resized_box
from vit_scale.data.augment.resize import resize
from vit_scale.data.augment.transforms import EvalTransform, TrainTransform
from vit_scale.data.draws import uniforms
from vit_scale.data.images.decode import ArrayImage, open_image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def rows(count: int, slots: int = 80, seed: int = 0) -> list[list[float]]:
    return uniforms(seed, np.arange(count), slots).tolist()


def train(size: tuple[int, int] = (32, 32), **options: Any) -> TrainTransform:
    options = {"hflip": 0.0, "crop": "none", "interpolation": "bicubic"} | options
    return TrainTransform(AugmentConfig(**options), size, MEAN, STD)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(96, 96), (300, 260), (64, 224)])
def test_resize_matches_pillow(mode: str, size: tuple[int, int], photographs: list[np.ndarray]) -> None:
    filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
    for photograph in photographs[:2]:
        ours = resize(photograph, size, mode).transpose(1, 2, 0)
        theirs = np.asarray(Image.fromarray(photograph).resize(size[::-1], filters[mode]))
        assert np.abs(ours.astype(int) - theirs).max() <= 1


@pytest.mark.parametrize(("height", "width"), [(224, 224), (180, 224), (224, 131), (96, 96), (40, 30), (1, 1)])
@pytest.mark.parametrize("crop", [0.875, 1.0])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_evaluation_matches_timm(
    height: int, width: int, crop: float, interpolation: str, photographs: list[np.ndarray]
) -> None:
    from timm.data import create_transform

    pixels = photographs[1][:height, :width]
    theirs = create_transform(96, crop_pct=crop, interpolation=interpolation, normalize=False)
    expected = theirs(Image.fromarray(pixels)).numpy().astype(int)
    augment = AugmentConfig(eval_crop=crop, eval_interpolation=interpolation)
    ours = EvalTransform(augment, (96, 96))(ArrayImage(pixels))
    assert np.abs(ours - expected).max() <= 1


def test_evaluation_of_jpeg_files_matches_timm(photographs: list[np.ndarray], encode: Callable[..., bytes]) -> None:
    from timm.data import create_transform

    large = Image.fromarray(photographs[0]).resize((1000, 800), Image.Resampling.BICUBIC)
    data = encode(large, "jpeg", quality=95)
    import io

    theirs = create_transform(96, interpolation="bicubic", normalize=False)(Image.open(io.BytesIO(data))).numpy()
    ours = EvalTransform(AugmentConfig(), (96, 96))(open_image(data, 3))
    assert np.abs(ours.astype(int) - theirs.astype(int)).mean() < 1


@pytest.mark.parametrize(("height", "width"), [(5, 4000), (4000, 5), (1, 3000)])
def test_long_strips_are_cropped_before_resizing(height: int, width: int) -> None:
    image = ArrayImage(np.full((height, width, 3), 9, np.uint8))
    row = rows(1)[0]
    results = [transform(image, row) for transform in (train((64, 64), crop="random"), train((64, 64)))]
    for out in [*results, EvalTransform(AugmentConfig(), (64, 64))(image)]:
        assert out.shape == (3, 64, 64)
        assert np.all(out == 9)
    assert train((64, 64), crop="random_resized")(image, row).shape == (3, 64, 64)


def test_crops_have_the_distribution_of_timm() -> None:
    from timm.data.transforms import RandomResizedCropAndInterpolation

    image = Image.new("L", (470, 400))
    theirs = np.array(
        [RandomResizedCropAndInterpolation.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(4000)]
    )
    boxes = np.array([random_resized_box(400, 470, AugmentConfig(), u) for u in rows(4000)])
    ours = np.stack([boxes[:, 1], boxes[:, 0], boxes[:, 3] - boxes[:, 1], boxes[:, 2] - boxes[:, 0]], axis=1)
    assert np.all(boxes[:, :2] >= 0)
    assert np.all(boxes[:, 2:] <= (470, 400))
    for quantile in (0.1, 0.5, 0.9):
        difference = np.quantile(ours, quantile, axis=0) - np.quantile(theirs, quantile, axis=0)
        assert np.abs(difference).max() < 20


def test_crop_that_cannot_fit_is_the_largest_centered_one() -> None:
    augment = AugmentConfig(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))
    assert random_resized_box(100, 300, augment, rows(1)[0]) == (100, 0, 200, 100)


def test_random_crop_shifts_by_at_most_the_padding(photographs: list[np.ndarray]) -> None:
    image = ArrayImage(photographs[0][:32, :32])
    padded = np.pad(photographs[0][:32, :32].transpose(2, 0, 1), ((0, 0), (4, 4), (4, 4)), mode="reflect")
    windows = {padded[:, y : y + 32, x : x + 32].tobytes() for y in range(9) for x in range(9)}
    seen = {train(crop="random")(image, u).tobytes() for u in rows(400)}
    assert seen <= windows
    assert len(seen) > 60
    black = train(crop="random", crop_border="black")
    assert any((black(image, u)[:, 0] == 0).all() for u in rows(20))


def test_flips_have_the_configured_probability(photographs: list[np.ndarray]) -> None:
    pixels = photographs[0][:32, :32]
    plain = pixels.transpose(2, 0, 1)
    transform = train(hflip=0.3, vflip=0.6)
    results = [transform(ArrayImage(pixels), u) for u in rows(600)]
    flipped = [plain[:, :, ::-1], plain[:, ::-1], plain[:, ::-1, ::-1]]
    across, down, both = (sum(np.array_equal(result, x) for result in results) / 600 for x in flipped)
    assert across == pytest.approx(0.3 * 0.4, abs=0.04)
    assert down == pytest.approx(0.7 * 0.6, abs=0.06)
    assert both == pytest.approx(0.3 * 0.6, abs=0.05)


def test_random_interpolation_uses_both_filters(photographs: list[np.ndarray]) -> None:
    transform = train(interpolation="random")
    results = {transform(ArrayImage(photographs[0]), u).tobytes() for u in rows(20)}
    expected = {
        train(interpolation=name)(ArrayImage(photographs[0]), rows(1)[0]).tobytes() for name in ("bicubic", "bilinear")
    }
    assert results == expected


def test_color_jitter_stays_in_its_range(photographs: list[np.ndarray]) -> None:
    import torch
    from torchvision.transforms.v2 import functional

    image = ArrayImage(photographs[0][:64, :64])
    plain = train((64, 64))(image, rows(1)[0])
    transform = train((64, 64), color_jitter=0.4)
    row = rows(1)[0]
    assert np.array_equal(transform(image, row), transform(image, row))
    brightest = functional.adjust_brightness(torch.from_numpy(plain), 1.4).numpy().mean()
    means = [transform(image, u).mean() for u in rows(100)]
    assert plain.mean() * 0.55 < min(means) < plain.mean() < max(means) < brightest * 1.1
    assert np.array_equal(train((64, 64), color_jitter=0.0)(image, row), plain)


def test_three_augment_is_one_of_three(photographs: list[np.ndarray]) -> None:
    image = ArrayImage(photographs[1][:64, :64])
    plain = train((64, 64))(image, rows(1)[0])
    transform = train((64, 64), three_augment=True)
    kinds = {"gray": 0, "solarized": 0, "blurred": 0}
    for u in rows(300):
        out = transform(image, u)
        if np.array_equal(out[0], out[1]):
            kinds["gray"] += 1
        elif np.array_equal(out, np.where(plain < 128, plain, 255 - plain)):
            kinds["solarized"] += 1
        else:
            kinds["blurred"] += 1
            assert np.abs(out.mean() - plain.mean()) < 2
            assert out.std() <= plain.std() + 0.5
    assert min(kinds.values()) > 70


@pytest.mark.parametrize("crop", ["none", "random", "random_resized"])
def test_all_operations_work_on_any_crop_and_shape(crop: str, photographs: list[np.ndarray]) -> None:
    options = {"rand_augment": "rand-m9-n4-p1-inc1", "erase": 1.0, "color_jitter": 0.3, "three_augment": True}
    transform = train((48, 40), crop=crop, hflip=0.5, **options)
    for u in rows(60, transform.slots):
        out = transform(ArrayImage(photographs[0][:100, :150]), u)
        assert out.shape == (3, 48, 40)


def test_operations_draw_independently(photographs: list[np.ndarray]) -> None:
    """Each reads its own slots: erasing does not change pixels outside its box."""
    image = ArrayImage(photographs[0])
    options = {
        "crop": "random_resized",
        "hflip": 0.5,
        "rand_augment": "rand-m9-mstd0.5-inc1",
        "interpolation": "random",
    }
    for u in rows(20, 120):
        plain, erased = train(**options)(image, u), train(**options, erase=1.0)(image, u)
        assert (plain == erased).mean() > 0.6


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_any_number_of_channels(channels: int) -> None:
    options = {"rand_augment": "rand-m9-n4-p1-inc1", "erase": 1.0, "color_jitter": 0.3, "three_augment": True}
    augment = AugmentConfig(**options)
    transform = TrainTransform(augment, (16, 16), (0.5,) * channels, (0.25,) * channels)
    image = ArrayImage(np.random.default_rng(0).integers(0, 256, (40, 30, channels), dtype=np.uint8))
    for u in rows(30, transform.slots):
        out = transform(image, u)
        assert out.shape == (channels, 16, 16)
        assert out.dtype == np.uint8


def test_erased_boxes_have_the_distribution_of_timm() -> None:
    boxes = [erased_box(224, 224, u) for u in rows(3000, 30)]
    areas = np.array([h * w / 224**2 for _, _, h, w in boxes])
    ratios = np.array([h / w for _, _, h, w in boxes])
    assert areas.min() > 0.015
    assert areas.max() < 1 / 3 + 0.01
    assert areas.mean() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.01)
    assert np.log(ratios).mean() == pytest.approx(0, abs=0.05)
    assert all(0 <= top <= 224 - h and 0 <= left <= 224 - w for top, left, h, w in boxes)


@pytest.mark.parametrize("mode", ["pixel", "color", "black"])
def test_erasing_fills_one_box(mode: str) -> None:
    erase = RandomErasing(0.25, mode, (64, 64), MEAN, STD)
    x = np.full((3, 64, 64), 250, np.uint8)
    changed = []
    for u in rows(400, 30):
        out = erase(x, u)
        if not np.array_equal(out, x):
            changed.append(out)
    assert np.all(x == 250)
    assert len(changed) / 400 == pytest.approx(0.25, abs=0.06)
    boxes = [out[:, (out != 250).any(axis=(0, 2))][:, :, (out != 250).any(axis=(0, 1))] for out in changed]
    if mode == "black":
        assert all(not box.any() for box in boxes)
    elif mode == "color":
        assert all(len(np.unique(box.reshape(3, -1), axis=1).T) == 1 for box in boxes)
    else:
        noise = np.concatenate([box.reshape(3, -1) for box in boxes], axis=1) / 255
        assert noise.mean(axis=1) == pytest.approx(MEAN, abs=0.02)
        assert noise.std(axis=1) == pytest.approx(STD, abs=0.02)
