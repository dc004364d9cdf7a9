"""Draw image grids with captions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont

from vit_scale.data.normalize import Values

_TILE = 168
_CAPTION = 38
"""Two lines of text."""
_MARGIN = 8
_FONT_SIZE = 14
_PIXEL_ART = 48
"""Images up to this size are enlarged pixel by pixel, larger ones smoothly."""


def caption(target: torch.Tensor, names: Sequence[str], smoothing: float = 0.0) -> str:
    """Return the class of an image, or the two classes that were mixed with their weights, the larger one first.

    `smoothing` is the label smoothing in `target`, which is not mixing.
    """
    mixed = (target - smoothing / len(target)) / max(1e-6, 1 - smoothing)
    top = torch.topk(mixed, min(2, len(mixed)))
    pairs = [(names[i][:20], weight) for weight, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)]
    if len(pairs) == 1 or pairs[1][1] < 0.005:
        return pairs[0][0]
    return "\n".join(f"{name}: {weight:.2f}" for name, weight in pairs)


def to_pil_images(images: torch.Tensor, mean: Values, std: Values) -> list[Image.Image]:
    """Undo the normalization; shows the first three channels, or the first of two."""
    shape = (1, -1, 1, 1)
    levels = (images * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)) * 255
    shown = levels[:, :3] if images.shape[1] >= 3 else levels[:, :1].expand(-1, 3, -1, -1)
    pixels = shown.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return [Image.fromarray(image.numpy()) for image in pixels]


def draw_grid(images: Sequence[Image.Image], captions: Sequence[str], columns: int | None = None) -> Image.Image:
    """Draw tiles with captions below, in a grid as square as possible. Small images are enlarged to fill their tile."""
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width, height = _tile_size(images[0])
    way = Image.Resampling.NEAREST if max(images[0].size) <= _PIXEL_ART else Image.Resampling.BICUBIC
    step_x, step_y = max(width, _TILE) + _MARGIN, height + _CAPTION + _MARGIN
    grid = Image.new("RGB", (columns * step_x + _MARGIN, rows * step_y + _MARGIN), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(_FONT_SIZE)
    for i, (image, text) in enumerate(zip(images, captions, strict=True)):
        left, top = _MARGIN + i % columns * step_x, _MARGIN + i // columns * step_y
        tile = image if image.size == (width, height) else image.resize((width, height), way)
        grid.paste(tile, (left + (step_x - _MARGIN - width) // 2, top))
        lines = (_fitting(line, font, step_x - _MARGIN) for line in text.split("\n"))
        draw.multiline_text((left, top + height + 2), "\n".join(lines), fill="black", font=font, spacing=2)
    return grid


def _tile_size(image: Image.Image) -> tuple[int, int]:
    """Return the size of a tile: no side is shorter than the image's, the longer one is at least `_TILE`."""
    scale = max(1.0, _TILE / max(image.size))
    return max(1, round(image.width * scale)), max(1, round(image.height * scale))


def _fitting(line: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Shorten a line that is wider than its tile."""
    if font.getlength(line) <= width:
        return line
    return next((short for end in range(len(line), 0, -1) if font.getlength(short := f"{line[:end]}…") <= width), "")
