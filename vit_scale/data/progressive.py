"""Smaller images in the earlier part of a run: more of them in the same time, the details at the end.

Images are loaded, augmented and mixed at the model's own size, then shrunk where the model is, so that what a position
of the run shows does not depend on this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vit_scale.errors import UserError
from vit_scale.models.interface import ImageModel


class Progressive:
    """Image size as a function of the step; the model's own throughout where there are no phases."""

    def __init__(self, phases: Sequence[tuple[float, int]], steps: int):
        """`phases` are pairs of the share of the run at which one begins, and its image size."""
        self._starts = [(round(share * steps), size) for share, size in phases]

    def size_at(self, step: int) -> int | None:
        """Side of the images of a step; None: as they are."""
        sizes = [size for start, size in self._starts if step >= start]
        return sizes[-1] if sizes else None

    def __call__(self, images: torch.Tensor, step: int) -> torch.Tensor:
        """`images` [B, C, H, W] at the size of the step."""
        size = self.size_at(step)
        if size is None or images.shape[-2:] == (size, size):
            return images
        return F.interpolate(images, (size, size), mode="bilinear", antialias=True)


def make_progressive(phases: Sequence[tuple[float, int]], steps: int, model: ImageModel) -> Progressive:
    """Check `phases` against the model and prepare it for them; raises UserError."""
    if phases:
        _check(phases, model)
        model.allow_any_size()
    return Progressive(phases, steps)


def _check(phases: Sequence[tuple[float, int]], model: ImageModel) -> None:
    shares, sizes = zip(*phases, strict=True)
    if list(shares) != sorted(set(shares)) or not shares[0] >= 0 or shares[-1] >= 1:
        raise UserError(f"augment.progressive: shares of the run must rise from 0 to below 1, not {list(shares)}")
    largest = min(model.img_size)
    step = max(model.patch_size) if model.patch_size else 1
    for size in sizes:
        if size > largest or size % step:
            raise UserError(
                f"augment.progressive: size {size} must be a multiple of the patch ({step}) up to the model's {largest}"
            )
