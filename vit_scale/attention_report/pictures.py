"""Pictures of attention over images: rows of tiles with a heat map over the image, drawn without matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from vit_scale.attention_report.maps import AttentionMaps
from vit_scale.tasks.classify.image_grids import blend_heat, uint8_images

TILE = 104
"""Longer side of a tile in pixels."""
MAX_BLOCKS = 12
"""Blocks that are shown if none are chosen."""
_GAP, _CAPTION, _FONT, _SMALL, _LINE = 6, 15, 14, 11, 15
_GRAY = "#555555"
_PIXEL_ART = 64
"""Images up to this size are enlarged pixel by pixel."""
_SCALE = 128
"""Width of the color scale in pixels."""


@dataclass(frozen=True)
class Tile:
    """An image of a picture, and a short text below it."""

    image: Image.Image
    caption: str = ""


def spread_blocks(depth: int, count: int) -> list[int]:
    """Return `count` blocks evenly spread from the first to the last; all if there are no more."""
    return list(range(depth)) if depth <= count else np.linspace(0, depth - 1, count).round().astype(int).tolist()


def heads_picture(
    image_CHW: torch.Tensor, maps: AttentionMaps, index: int, *, blocks: Sequence[int], heads: Sequence[int], title: str
) -> Image.Image:
    """Draw one image: its rollout, then per block the mean over heads and the chosen heads.

    `maps` are those of a batch, `index` is the image's place in it.
    """
    image = _resized(image_CHW)
    rows = [("", [Tile(image, "input"), _heat(image, maps.rollout[index], "rollout ")])]
    for block in blocks:
        found = maps.shown[block][index]
        tiles = [_heat(image, found.mean(0)), *(_heat(image, found[head]) for head in heads)]
        rows.append((f"block {block}", tiles))
    columns = ["mean of heads", *(f"head {head}" for head in heads)]
    return draw_tiles(rows, columns, title, legend(maps), columns_from_row=1)


def overview_picture(
    images_BCHW: torch.Tensor, maps: AttentionMaps, *, blocks: Sequence[int], names: Sequence[str], title: str = ""
) -> Image.Image:
    """Draw a row per image: the image, its rollout, and the mean over heads of each block."""
    rows = []
    for index, (pixels, name) in enumerate(zip(images_BCHW, names, strict=True)):
        image = _resized(pixels)
        means = [_heat(image, maps.shown[block][index].mean(0)) for block in blocks]
        rows.append(("", [Tile(image, name), _heat(image, maps.rollout[index]), *means]))
    columns = ["input", "rollout", *(f"block {block}" for block in blocks)]
    return draw_tiles(rows, columns, title, legend(maps))


def legend(maps: AttentionMaps) -> list[str]:
    """Return lines that say what the colors and numbers of a picture are."""
    rows, columns = maps.layout.grid
    return [
        f"attention to {rows} x {columns} patches of the query: {maps.layout.query}",
        "numbers and colors: least to most attended patch; 1 is uniform attention",
    ]


def side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    """Return pictures next to each other."""
    width, height = sum(each.width for each in pictures), max(each.height for each in pictures)
    found = Image.new("RGB", (width, height), "white")
    left = 0
    for each in pictures:
        found.paste(each, (left, 0))
        left += each.width
    return found


def draw_tiles(
    rows: Sequence[tuple[str, Sequence[Tile]]],
    columns: Sequence[str],
    title: str,
    lines: Sequence[str],
    *,
    columns_from_row: int = 0,
) -> Image.Image:
    """Draw rows of tiles with labels on the left, captions below, column headings, a title and lines of text above.

    The headings stand above row `columns_from_row`.
    """
    font, small = ImageFont.load_default(_FONT), ImageFont.load_default(_SMALL)
    tile = rows[0][1][0].image.size
    labels = max(round(font.getlength(label)) for label, _ in rows)
    left = _GAP + (labels + _GAP if labels else 0)
    # Headings do not overlap.
    step_x = max(tile[0], *(round(small.getlength(name)) for name in columns)) + _GAP
    step_y = tile[1] + _CAPTION + _GAP
    title_height, heading = 20 if title else 0, 16
    top = _GAP + title_height + _LINE * len(lines) + 22
    most = max(len(tiles) for _, tiles in rows)
    texts = [round(font.getlength(title)), *(round(small.getlength(line)) for line in lines), _SCALE + 110]
    width = max(left + most * step_x, max(texts) + 2 * _GAP)
    picture = Image.new("RGB", (width, top + heading + len(rows) * step_y), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((_GAP, _GAP), title, fill="black", font=font)
    for number, line in enumerate(lines):
        draw.text((_GAP, _GAP + title_height + _LINE * number), line, fill=_GRAY, font=small)
    _draw_scale(picture, (_GAP, _GAP + title_height + _LINE * len(lines) + 2))
    y = top
    for number, (label, tiles) in enumerate(rows):
        if number == columns_from_row:
            for column, name in enumerate(columns):
                draw.text((left + column * step_x, y), name, fill=_GRAY, font=small)
            y += heading
        draw.text((_GAP, y + tile[1] // 2 - 8), label, fill="black", font=font)
        for column, each in enumerate(tiles):
            picture.paste(each.image, (left + column * step_x, y))
            text = _fitting(each.caption, small, step_x - _GAP)
            draw.text((left + column * step_x, y + tile[1] + 1), text, fill="black", font=small)
        y += step_y
    return picture


def _draw_scale(picture: Image.Image, place: tuple[int, int]) -> None:
    draw, small = ImageDraw.Draw(picture), ImageFont.load_default(_SMALL)
    levels = np.tile(np.linspace(0, 255, _SCALE, dtype=np.float32), (10, 1))
    draw.text(place, "least", fill=_GRAY, font=small)
    picture.paste(blend_heat(Image.new("L", (_SCALE, 10), 128), levels), (place[0] + 30, place[1] + 2))
    draw.text((place[0] + _SCALE + 36, place[1]), "most", fill=_GRAY, font=small)


def _resized(image_CHW: torch.Tensor) -> Image.Image:
    """Return uint8 planes as an image whose longer side is `TILE`."""
    (image,) = uint8_images(image_CHW[None])
    scale = TILE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    way = Image.Resampling.NEAREST if max(image.size) <= _PIXEL_ART else Image.Resampling.BICUBIC
    return image.resize(size, way)


def _heat(image: Image.Image, map_HW: torch.Tensor, prefix: str = "") -> Tile:
    """Return the image under its map, from the least to the most attended patch."""
    strength = map_HW.float().clamp(min=0)
    strength = strength / strength.sum().clamp(min=1e-30)
    low, high = float(strength.min()), float(strength.max())
    levels = Image.fromarray(((strength - low) / max(high - low, 1e-12) * 255).numpy().astype(np.float32))
    way = Image.Resampling.NEAREST if min(strength.shape) < 4 else Image.Resampling.BILINEAR
    smooth = np.asarray(levels.resize(image.size, way))
    least, most = (f"{value * strength.numel():.1f}" for value in (low, high))
    return Tile(blend_heat(image, smooth), f"{prefix}{least} to {most}")


def _fitting(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    while text and font.getlength(text) > width:
        text = text[:-2] + "…" if len(text) > 2 else ""
    return text
