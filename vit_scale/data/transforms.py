"""What happens to one image: crop, resize, flip in training; resize and centre crop in evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vit_scale.config import AugmentConfig

Box = tuple[float, float, float, float]
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
SLOTS = 64


def random_resized_box(width: int, height: int, augment: AugmentConfig, u: Sequence[float]) -> Box:
    """Box of a random share of the area and a random ratio; ten tries, then the largest central box in range."""
    low, high = (math.log(r) for r in augment.crop_ratio)
    for attempt in range(10):
        area = width * height * (augment.crop_scale[0] + u[2 * attempt] * (augment.crop_scale[1] - augment.crop_scale[0]))
        ratio = math.exp(low + u[2 * attempt + 1] * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(u[20] * (width - w + 1)), int(u[21] * (height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * augment.crop_ratio[1])))
    h = min(height, max(1, round(width / augment.crop_ratio[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def train_transform(image: Image.Image, size: tuple[int, int], augment: AugmentConfig, u: Sequence[float]) -> np.ndarray:
    """One augmented training image, [H, W] or [H, W, C]."""
    height, width = size
    name = augment.interpolation
    if name == "random":
        name = "bicubic" if u[22] < 0.5 else "bilinear"
    if augment.crop == "random_resized":
        box = random_resized_box(image.width, image.height, augment, u)
        image = image.resize((width, height), FILTERS[name], box=box)
    else:
        image = image.resize((width, height), FILTERS[name])
        if augment.crop == "random":
            pad = augment.crop_padding
            array = np.asarray(image)
            padded = np.pad(array, ((pad, pad), (pad, pad)) + ((0, 0),) * (array.ndim - 2), mode="reflect")
            top, left = int(u[20] * (2 * pad + 1)), int(u[21] * (2 * pad + 1))
            image = Image.fromarray(padded[top : top + height, left : left + width])
    array = np.asarray(image)
    if u[23] < augment.hflip:
        array = array[:, ::-1]
    if u[24] < augment.vflip:
        array = array[::-1]
    return array


def eval_transform(image: Image.Image, size: tuple[int, int], augment: AugmentConfig) -> np.ndarray:
    """The central part of the image, [H, W] or [H, W, C]."""
    height, width = size
    scale = max(width / image.width, height / image.height) / augment.eval_crop
    w, h = width / scale, height / scale
    left, top = (image.width - w) / 2, (image.height - h) / 2
    box = (left, top, left + w, top + h)
    return np.asarray(image.resize((width, height), FILTERS[augment.eval_interpolation], box=box))
