"""Image grids of a run: the first training batch, misclassified images, attention maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from vit_scale.data.image_grid import caption, draw_grid, to_pil_images
from vit_scale.tasks.classify.analysis import Misclassified

_NAME = 20

# From dark violet over red to yellow, as strength goes from 0 to 1.
_COLORS = np.array([[20, 10, 60], [130, 30, 110], [225, 80, 55], [250, 230, 90]], dtype=np.float32)


def batch_grid(images: torch.Tensor, targets: torch.Tensor, normalization: tuple, names: Sequence[str]) -> Image.Image:
    """Draw normalized, mixed images with the classes and weights of their targets."""
    mean, std = normalization
    pictures = to_pil_images(images.float().cpu(), mean, std)
    return draw_grid(pictures, [caption(target, names) for target in targets.cpu()])


def misclassified_grid(found: list[Misclassified], names: Sequence[str]) -> Image.Image:
    """Draw misclassified images, the highest loss first, with true class, predicted class and its probability."""
    captions = [
        f"true {class_name(each.label, names)}\npredicted {class_name(each.predicted, names)}: {each.probability:.2f}"
        for each in found
    ]
    return draw_grid(uint8_pictures(torch.stack([each.image for each in found])), captions)


def attention_grid(
    images: torch.Tensor, maps: torch.Tensor, labels: list[int], names: Sequence[str], tile: int = 168
) -> Image.Image:
    """Draw each image next to its attention map; maps are [B, rows, columns]."""
    pictures, captions = [], []
    for picture, strength, label in zip(uint8_pictures(images), maps.float().cpu(), labels, strict=True):
        large = picture.resize((tile, tile * picture.height // picture.width), Image.Resampling.NEAREST)
        pictures += [large, _overlay(large, strength)]
        captions += [class_name(label, names), "attention"]
    return draw_grid(pictures, captions, columns=4)


def _overlay(picture: Image.Image, strength: torch.Tensor) -> Image.Image:
    """`picture` under a heat map from the least to the most attended patch."""
    low, high = strength.min(), strength.max()
    levels = ((strength - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8).numpy()
    smooth = np.asarray(Image.fromarray(levels).resize(picture.size, Image.Resampling.BILINEAR), dtype=np.float32)
    heights = np.linspace(0, 255, len(_COLORS))
    heat = np.stack([np.interp(smooth, heights, channel) for channel in _COLORS.T], axis=-1)
    return Image.blend(picture.convert("L").convert("RGB"), Image.fromarray(heat.astype(np.uint8)), 0.55)


def uint8_pictures(images: torch.Tensor) -> list[Image.Image]:
    """Pictures of uint8 images [B, C, H, W]."""
    return to_pil_images(images / 255, (0.0,), (1.0,))


def class_name(index: int, names: Sequence[str]) -> str:
    return (names[index] if index < len(names) else str(index))[:_NAME]
