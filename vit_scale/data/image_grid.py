"""A picture of what the model really receives: augmented, normalised, mixed, with labels and mixing weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from PIL import Image, ImageDraw

from vit_scale.config import Config
from vit_scale.data.loading.loaders import TrainLoader
from vit_scale.data.mixing import Mixing
from vit_scale.data.normalize import Normalize, Values, resolve_normalization
from vit_scale.data.sources.table_source import open_data
from vit_scale.models import create_from_config
from vit_scale.models.interface import ImageModel

_TILE = 168
_CAPTION = 26
_MARGIN = 6


def preview(config: Config, step: int = 0, count: int = 16) -> Image.Image:
    """A grid of the first images of a step's global batch, as they reach the model."""
    data = open_data(config.data, seed=config.run.seed)
    in_chans = config.model.in_chans or data.in_chans
    num_classes = config.model.num_classes or data.num_classes
    with torch.device("meta"):  # Only the model's sizes are wanted.
        model = cast(ImageModel, create_from_config(config.model, num_classes=num_classes, in_chans=in_chans))
    mean, std = resolve_normalization(config.data, config.model.name, in_chans)
    global_batch = config.batch.global_
    loader = TrainLoader(
        data.train,
        augment=config.augment,
        img_size=model.img_size,
        in_chans=in_chans,
        global_batch=global_batch,
        micro_batch=_largest_divisor(global_batch, count),
        rank=0,
        world=1,
        seed=config.run.seed,
        workers=0,
        start_step=step,
        end_step=step + 1,
        on_error=config.data.on_error,
        mean=mean,
        std=std,
    )
    mixing = Mixing(
        config.augment,
        num_classes=num_classes,
        global_batch=global_batch,
        seed=config.run.seed,
        patch_size=model.patch_size,
    )
    batch = next(iter(loader))
    images, targets = mixing(Normalize(mean, std)(batch.images), batch.target["label"], step=step, offset=0)
    captions = [caption(row, data.class_names) for row in targets]
    return draw_grid(to_pictures(images, mean, std), captions)


def _largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(min(limit, number), 0, -1) if number % divisor == 0)


def caption(target: torch.Tensor, names: Sequence[str]) -> str:
    """The classes of a soft target and their weights, the larger first; what smoothing spreads is left out."""
    spread = target.min().item()
    top = torch.topk(target, min(2, len(target)))
    parts = []
    for weight, index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        if weight - spread > 1e-3:
            name = names[index] if index < len(names) else str(index)
            parts.append((name, weight))
    return "\n".join(f"{name[:20]}: {weight:.2f}" for name, weight in parts)


def to_pictures(images: torch.Tensor, mean: Values, std: Values) -> list[Image.Image]:
    """Undo the normalisation; of many channels the first three are shown, of two the first."""
    shape = (1, -1, 1, 1)
    levels = (images * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)) * 255
    shown = levels[:, :3] if images.shape[1] >= 3 else levels[:, :1].expand(-1, 3, -1, -1)
    pixels = shown.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return [Image.fromarray(image.numpy()) for image in pixels]


def draw_grid(pictures: Sequence[Image.Image], captions: Sequence[str], columns: int | None = None) -> Image.Image:
    """Tiles with their captions below, as square as it goes. Small images are enlarged pixel by pixel."""
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    scale = max(1, _TILE // max(pictures[0].size))
    width, height = (side * scale for side in pictures[0].size)
    step_x, step_y = max(width, _TILE) + _MARGIN, height + _CAPTION + _MARGIN
    grid = Image.new("RGB", (columns * step_x + _MARGIN, rows * step_y + _MARGIN), "white")
    draw = ImageDraw.Draw(grid)
    for i, (picture, text) in enumerate(zip(pictures, captions, strict=True)):
        left, top = _MARGIN + i % columns * step_x, _MARGIN + i // columns * step_y
        grid.paste(picture.resize((width, height), Image.Resampling.NEAREST), (left, top))
        draw.multiline_text((left, top + height + 1), text, fill="black", spacing=1)
    return grid
