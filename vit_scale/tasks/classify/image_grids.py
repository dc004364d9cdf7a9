"""Image grids of a run: the first training batch, misclassified images, attention maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from vit_scale.data.image_grid import caption, draw_grid, to_pil_images
from vit_scale.format import percent
from vit_scale.tasks.classify.analysis import Misclassified

_NAME = 20
_BAR = 160
"""Width of the color scale in pixels."""

# From dark violet over red to yellow, as strength goes from 0 to 1.
_COLORS = np.array([[20, 10, 60], [130, 30, 110], [225, 80, 55], [250, 230, 90]], dtype=np.float32)


def batch_grid(
    images: torch.Tensor, targets: torch.Tensor, normalization: tuple, names: Sequence[str], smoothing: float
) -> Image.Image:
    """Draw normalized, mixed images with their classes, and the weights of mixed classes."""
    mean, std = normalization
    captions = [caption(target, names, smoothing) for target in targets.cpu()]
    return draw_grid(to_pil_images(images.float().cpu(), mean, std), captions)


def misclassified_grid(found: list[Misclassified], names: Sequence[str]) -> Image.Image:
    """Draw misclassified images, the highest loss first, with true class, predicted class and its probability."""
    captions = [
        f"true {names[each.label][:_NAME]}\npredicted {names[each.predicted][:_NAME]}: {each.probability:.2f}"
        for each in found
    ]
    return draw_grid(uint8_images(torch.stack([each.image for each in found])), captions)


def attention_grid(
    images: torch.Tensor, maps: torch.Tensor, labels: list[int], names: Sequence[str], tile: int = 168
) -> Image.Image:
    """Draw each image next to its attention map, with the scale of the colors; maps are [B, rows, columns]."""
    tiles, captions = [], []
    for image, strength, label in zip(uint8_images(images), maps.float().cpu(), labels, strict=True):
        large = image.resize((tile, tile * image.height // image.width), Image.Resampling.NEAREST)
        tiles += [large, _overlay(large, strength)]
        # The colors of each map span its own values, so each has its scale written below.
        captions += [
            names[label][:_NAME],
            f"{percent(strength.min().item(), 1)} to {percent(strength.max().item(), 1)}",
        ]
    return _with_scale(draw_grid(tiles, captions, columns=4), next(iter(maps)).numel())


def _with_scale(grid: Image.Image, patches: int) -> Image.Image:
    """Add the scale of the colors below a grid."""
    bar = blend_heat(Image.new("L", (_BAR, 14), 128), np.tile(np.linspace(0, 255, _BAR, dtype=np.float32), (14, 1)))
    scaled = Image.new("RGB", (grid.width, grid.height + 48), "white")
    scaled.paste(grid)
    draw, font = ImageDraw.Draw(scaled), ImageFont.load_default(14)
    top = grid.height + 2
    draw.text((8, top), "least", fill="black", font=font)
    scaled.paste(bar, (50, top + 2))
    draw.text((58 + _BAR, top), "most attended patch of the image", fill="black", font=font)
    average = f"numbers: fraction of the attention that a patch receives; average {percent(1 / patches, 1)}"
    draw.text((8, top + 20), average, fill="black", font=font)
    return scaled


def _overlay(image: Image.Image, strength: torch.Tensor) -> Image.Image:
    """Draw a heat map over `image`, from the least to the most attended patch."""
    low, high = strength.min(), strength.max()
    levels = ((strength - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8).numpy()
    smooth = np.asarray(Image.fromarray(levels).resize(image.size, Image.Resampling.BILINEAR), dtype=np.float32)
    return blend_heat(image, smooth)


def blend_heat(image: Image.Image, levels: np.ndarray) -> Image.Image:
    """Blend a gray image with the colors of levels from 0 to 255."""
    heights = np.linspace(0, 255, len(_COLORS))
    heat = np.stack([np.interp(levels, heights, channel) for channel in _COLORS.T], axis=-1)
    return Image.blend(image.convert("L").convert("RGB"), Image.fromarray(heat.astype(np.uint8)), 0.55)


def uint8_images(images: torch.Tensor) -> list[Image.Image]:
    """Convert uint8 images [B, C, H, W] to Pillow images."""
    return to_pil_images(images / 255, (0.0,), (1.0,))
