"""Patches of images, and which of them are masked.

Shapes: B batch, C channels, H W pixels, G patches (grid height x grid width), K kept patches, P numbers in a patch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vit_scale.data.draws import uniforms

TRAINING, EVALUATION = 0x6D616574, 0x6D616576
"""Streams of random numbers: those of a position in training, and of the index of an image in evaluation."""
EPS = 1e-6
"""Added to the variance of a patch."""


def count_kept(patches: int, mask_ratio: float) -> int:
    """Return how many patches the encoder computes; may be 0."""
    return int(patches * (1 - mask_ratio))


def kept_patches(seed: int, positions: Tensor, patches: int, kept: int, *, stream: int) -> Tensor:
    """Return the indices of the patches that are kept, int64 [B, K] in ascending order, on the host.

    They are those with the lowest random numbers of the image, a function of (seed, position, stream).
    """
    noise = uniforms(seed, positions.numpy(), patches, stream)
    lowest = np.argpartition(noise, kept - 1, axis=1)[:, :kept]
    return torch.from_numpy(np.sort(lowest, axis=1))


def masked_patches(keep_BK: Tensor, patches: int) -> Tensor:
    """Return bool [B, G]: False for the patches of the indices `keep_BK`."""
    masked_BG = torch.ones(len(keep_BK), patches, dtype=torch.bool, device=keep_BK.device)
    return masked_BG.scatter_(1, keep_BK, False)


def to_patches(images_BCHW: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Return the pixels of every patch, [B, G, P]: patches row by row, in each the channels of a pixel together."""
    height, width = patch_size
    x = images_BCHW.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # b c rows height columns width
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def from_patches(pixels_BGP: Tensor, patch_size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Return the images [B, C, H, W] of patches on a grid of rows and columns."""
    x = pixels_BGP.unflatten(2, (*patch_size, -1)).unflatten(1, grid)  # b rows columns height width c
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def patch_statistics(pixels_BGP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each patch, [B, G, 1]."""
    mean = pixels_BGP.mean(-1, keepdim=True)
    return mean, (pixels_BGP.var(-1, keepdim=True) + EPS).sqrt()
