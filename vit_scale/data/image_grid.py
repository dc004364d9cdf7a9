"""Draw image grids with captions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw

from vit_scale.data.normalize import Values

_TILE = 168
_CAPTION = 26
_MARGIN = 6


def caption(target: torch.Tensor, names: Sequence[str]) -> str:
    """Return the classes of a soft target with their weights, the larger first, without label smoothing."""
    spread = target.min().item()
    top = torch.topk(target, min(2, len(target)))
    parts = []
    for weight, index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        if weight - spread > 1e-3:
            parts.append(f"{names[index][:20]}: {weight:.2f}")
    return "\n".join(parts)


def to_pil_images(images: torch.Tensor, mean: Values, std: Values) -> list[Image.Image]:
    """Undo the normalization; shows the first three channels, or the first of two."""
    shape = (1, -1, 1, 1)
    levels = (images * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)) * 255
    shown = levels[:, :3] if images.shape[1] >= 3 else levels[:, :1].expand(-1, 3, -1, -1)
    pixels = shown.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return [Image.fromarray(image.numpy()) for image in pixels]


def draw_grid(images: Sequence[Image.Image], captions: Sequence[str], columns: int | None = None) -> Image.Image:
    """Draw tiles with captions below, in a grid as square as possible. Small images are enlarged pixel by pixel."""
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    scale = max(1, _TILE // max(images[0].size))
    width, height = (side * scale for side in images[0].size)
    step_x, step_y = max(width, _TILE) + _MARGIN, height + _CAPTION + _MARGIN
    grid = Image.new("RGB", (columns * step_x + _MARGIN, rows * step_y + _MARGIN), "white")
    draw = ImageDraw.Draw(grid)
    for i, (image, text) in enumerate(zip(images, captions, strict=True)):
        left, top = _MARGIN + i % columns * step_x, _MARGIN + i // columns * step_y
        grid.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, top))
        draw.multiline_text((left, top + height + 1), text, fill="black", spacing=1)
    return grid
