"""Resample weights that depend on image size, patch size or channels.

Shapes: G patches, P prefix tokens with a position, D token width, C channels, H heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_scale.errors import UserError

Grid = tuple[int, int]


def source_grid(patches: int, like: Grid) -> Grid | None:
    """Return rows and columns of so many patches: square if possible, otherwise proportional to `like`, or None."""
    side = math.isqrt(patches)
    if side * side == patches:
        return side, side
    rows = max(1, round(math.sqrt(patches * like[0] / like[1])))
    columns = patches // rows
    return (rows, columns) if rows * columns == patches and rows * like[1] == columns * like[0] else None


def resample_positions(pos_1GD: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resample the position embeddings of patches to another grid: bicubic, antialiased, as timm does."""
    from timm.layers.pos_embed import resample_abs_pos_embed

    return resample_abs_pos_embed(pos_1GD, new_size=list(new), old_size=list(old), num_prefix_tokens=0)


def resample_line(pos_1LD: Tensor, length: int) -> Tensor:
    """Resample the embeddings of rows or columns to another length by linear interpolation."""
    return F.interpolate(pos_1LD.transpose(1, 2), size=length, mode="linear").transpose(1, 2)


def resample_relative_bias(table_TH: Tensor, length: int, new: Grid, old: Grid | None = None) -> Tensor:
    """Resample the relative position bias to another grid: offsets bicubic, the entries of prefix tokens unchanged."""
    size = (2 * new[0] - 1, 2 * new[1] - 1)
    prefix = length - size[0] * size[1]
    offsets = len(table_TH) - prefix
    side = math.isqrt(offsets)
    old_size = (2 * old[0] - 1, 2 * old[1] - 1) if old else (side, side)
    if old_size[0] * old_size[1] != offsets:
        raise UserError(
            f"model.weights: cannot determine the patch grid from {len(table_TH)} relative positions; "
            "pass `grid=(rows, columns)` to load_weights, and keep the same prefix tokens."
        )
    image = table_TH[:offsets].T.reshape(1, -1, *old_size).float()
    image = F.interpolate(image, size=size, mode="bicubic", antialias=True)
    return torch.cat([image[0].flatten(1).T.to(table_TH.dtype), table_TH[offsets:]])


def resample_patch_kernel(weight: Tensor, size: tuple[int, int]) -> Tensor:
    """Resample the patch convolution to another patch size.

    By the pseudo-inverse of resizing (FlexiViT, arXiv:2212.08013): a resized image with patches of the new size gives
    the same tokens, up to what resizing loses.
    """
    from timm.layers.patch_embed import resample_patch_embed

    return resample_patch_embed(weight, list(size))


def resample_channels(weight: Tensor, channels: int) -> Tensor:
    """Adapt the patch convolution to other channels: summed for one, otherwise repeated at the same scale."""
    old = weight.shape[1]
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    repeated = weight.repeat(1, math.ceil(channels / old), 1, 1)[:, :channels]
    return repeated * (old / channels)
