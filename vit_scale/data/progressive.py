"""Progressive resizing: smaller images early in a run give more images per second, full detail comes at the end.

Images are loaded, augmented and mixed at the model's own size, then resized on its device, so that the image at a
position does not depend on this option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from vit_scale.errors import UserError
from vit_scale.models.interface import ImageModel, backbone_of
from vit_scale.models.variants import check_groups


class Progressive:
    """Image size as a function of the step; the model's own size if there are no phases."""

    def __init__(self, phases: Sequence[tuple[float, int]], steps: int):
        """`phases` are pairs (fraction of the run at which the phase begins, image size)."""
        self._starts = [(round(fraction * steps), size) for fraction, size in phases]

    def size_at(self, step: int) -> int | None:
        """Return the image size of a step; None: unchanged."""
        sizes = [size for start, size in self._starts if step >= start]
        return sizes[-1] if sizes else None

    def largest_step(self) -> int:
        """Return a step with the largest images of the run."""
        starts = [start for start, _ in self._starts]
        # Before the first phase, images have the model's own size, which no phase exceeds.
        return max(starts, key=lambda step: self.size_at(step) or 0) if starts and starts[0] == 0 else 0

    def __call__(self, images: torch.Tensor, step: int) -> torch.Tensor:
        """Resize `images` [B, C, H, W] to the size of the step."""
        size = self.size_at(step)
        if size is None or images.shape[-2:] == (size, size):
            return images
        return F.interpolate(images, (size, size), mode="bilinear", antialias=True)


def make_progressive(phases: Sequence[tuple[float, int]], steps: int, model: ImageModel) -> Progressive:
    """Check `phases` against the model and prepare the model for them; raises UserError."""
    if phases:
        _check(phases, model)
        model.allow_any_size()
    return Progressive(phases, steps)


def _check(phases: Sequence[tuple[float, int]], model: ImageModel) -> None:
    fractions, sizes = zip(*phases, strict=True)
    if list(fractions) != sorted(set(fractions)) or not fractions[0] >= 0 or fractions[-1] >= 1:
        raise UserError(
            f"augment.progressive: fractions of the run must increase from 0 to below 1, not {list(fractions)}"
        )
    largest = min(model.img_size)
    step = max(model.patch_size) if model.patch_size else 1
    for size in sizes:
        if size > largest or size % step:
            raise UserError(
                f"augment.progressive: size {size} must be a multiple of the patch size ({step}) and at most "
                f"{largest}, the model's image size"
            )
        variant = getattr(backbone_of(model), "variant", None)
        if variant is not None:
            check_groups(replace(variant, img_size=(size, size)), f"size {size} in augment.progressive")
