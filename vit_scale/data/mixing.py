"""MixUp (Zhang et al., 2018) and CutMix (Yun et al., 2019) of a batch on the model's device, with soft targets.

All random choices of a step are drawn on the host for the full global batch from (seed, step), then sliced to the
micro-batch, so any number of processes and any micro-batch size mix identically. An image's partner is its neighbor in
the global batch (places 0 and 1, 2 and 3, ...), so an even micro-batch contains all partners. In an odd one the last
three are mixed in a circle, which depends on its size: only even micro-batches are mixed the same way everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vit_scale import gpu
from vit_scale.config import AugmentConfig

# Separates these draws from other uses of (seed, step).
_STREAM = 0x6D69786E


@dataclass(frozen=True)
class MixPlan:
    """How each image of a batch is mixed: one row per image."""

    lam: npt.NDArray[np.float32]
    """Fraction of the image itself, the rest is its partner; for CutMix after clipping the box at the border."""
    box: npt.NDArray[np.int64]
    """CutMix: [top, bottom, left, right] of the partner's box; an empty box otherwise."""
    blend: npt.NDArray[np.float32]
    """MixUp: weight of the image's own pixels outside the box; 1 for CutMix."""
    patches: npt.NDArray[np.bool_] | None = None
    """MixUp by patches: True for the partner's patches, in row-major order."""

    def __getitem__(self, rows: slice) -> MixPlan:
        patches = None if self.patches is None else self.patches[rows]
        return MixPlan(self.lam[rows], self.box[rows], self.blend[rows], patches)


def partners(size: int) -> npt.NDArray[np.int64]:
    """Return the partner of each image: its neighbor, or in a circle for the last three of an odd batch."""
    partner = np.arange(size) ^ 1
    if size % 2 and size > 1:
        partner[-3:] = np.array([size - 2, size - 1, size - 3])
    return np.minimum(partner, size - 1)


def soft_targets(labels: torch.Tensor, num_classes: int, smoothing: float) -> torch.Tensor:
    """Return one-hot rows with `smoothing` of the mass spread evenly over all classes."""
    off = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), off, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + off)


def mix_images(images: torch.Tensor, partner: torch.Tensor, plan: MixPlan, patch: tuple[int, int]) -> torch.Tensor:
    """Mix images with `images[partner]` according to the plan."""
    own = _own_weight(plan, images, patch)
    return torch.lerp(images[partner], images, own)


def mix_targets(targets: torch.Tensor, partner: torch.Tensor, lam: torch.Tensor) -> torch.Tensor:
    """Mix targets with `targets[partner]`; `lam` [B] is the fraction of the image itself."""
    return targets * lam[:, None] + targets[partner] * (1 - lam[:, None])


def _own_weight(plan: MixPlan, images: torch.Tensor, patch: tuple[int, int]) -> torch.Tensor:
    """Return the weight of each image's own pixels, [B, 1, H, W] or broadcastable to it."""
    height, width = images.shape[-2:]
    blend = _to_device(plan.blend, images.device).to(images.dtype).view(-1, 1, 1, 1)
    if plan.patches is not None:
        mask = _to_device(plan.patches, images.device).view(-1, 1, height // patch[0], width // patch[1])
        theirs = mask.repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3)
        blend = torch.where(theirs, 0, blend)
    if not (plan.box[:, 1] > plan.box[:, 0]).any():
        return blend
    top, bottom, left, right = _to_device(plan.box, images.device).view(-1, 4, 1).unbind(1)
    y, x = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    inside = ((y >= top) & (y < bottom))[:, None, :, None] & ((x >= left) & (x < right))[:, None, None, :]
    return torch.where(inside, 0, blend)


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return gpu.upload(torch.from_numpy(np.ascontiguousarray(array)), device)


def cutmix_boxes(
    lam: npt.NDArray[np.float64],
    center_y: npt.NDArray[np.int64],
    center_x: npt.NDArray[np.int64],
    size: tuple[int, int],
) -> npt.NDArray[np.int64]:
    """Return boxes [top, bottom, left, right] of `1 - lam` of the area around the centers, clipped at the border."""
    height, width = size
    side = np.sqrt(1 - lam)
    cut_h, cut_w = (height * side).astype(np.int64), (width * side).astype(np.int64)
    top, bottom = center_y - cut_h // 2, center_y + (cut_h + 1) // 2
    left, right = center_x - cut_w // 2, center_x + (cut_w + 1) // 2
    return np.stack(
        [np.clip(top, 0, height), np.clip(bottom, 0, height), np.clip(left, 0, width), np.clip(right, 0, width)], axis=1
    )


class Mixing:
    """Mixes a micro-batch and computes its soft targets; only smooths labels if nothing is mixed."""

    def __init__(
        self,
        augment: AugmentConfig,
        *,
        num_classes: int,
        global_batch: int,
        seed: int,
        patch_size: int | tuple[int, int] | None = None,
        off_from_step: int | None = None,
    ):
        """`patch_size` is required by `augment.mix_patches`; from `off_from_step` on nothing is mixed."""
        self.augment, self.num_classes, self.global_batch, self.seed = augment, num_classes, global_batch, seed
        size = patch_size or 16
        self.patch = size if isinstance(size, tuple) else (size, size)
        self.off_from_step = off_from_step
        self._planned: tuple[tuple[int, tuple[int, int]], MixPlan | None] | None = None

    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor, *, step: int, offset: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix normalized images [m, C, H, W] whose first one is at place `offset` of the step's global batch."""
        targets = soft_targets(labels, self.num_classes, self.augment.label_smoothing)
        full = self.plan(step, (images.shape[-2], images.shape[-1]))
        if full is None:
            return images, targets
        plan = full[offset : offset + len(images)]
        partner = _to_device(partners(len(images)), images.device)
        lam = _to_device(plan.lam, images.device)
        return mix_images(images, partner, plan, self.patch), mix_targets(targets, partner, lam)

    def plan(self, step: int, size: tuple[int, int]) -> MixPlan | None:
        """Return how the global batch of `step` is mixed; None: not at all."""
        if self._planned is None or self._planned[0] != (step, size):
            self._planned = ((step, size), self._draw(step, size))
        return self._planned[1]

    def _draw(self, step: int, size: tuple[int, int]) -> MixPlan | None:
        augment = self.augment
        if augment.mixup == 0 and augment.cutmix == 0:
            return None
        if self.off_from_step is not None and step >= self.off_from_step:
            return None
        rng = np.random.default_rng([self.seed, step, _STREAM])
        rows = {"batch": 1, "pair": (self.global_batch + 1) // 2, "elem": self.global_batch}[augment.mix_mode]
        mixed = rng.random(rows) < augment.mix_prob
        if not mixed.any():
            return None
        cut = mixed & (rng.random(rows) < self._cutmix_probability())
        lam = np.where(cut, _beta(rng, augment.cutmix, rows), _beta(rng, augment.mixup, rows))
        lam = np.where(mixed, lam, 1.0)
        box = cutmix_boxes(lam, rng.integers(0, size[0], rows), rng.integers(0, size[1], rows), size)
        box[~cut] = 0
        area = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2]) / (size[0] * size[1])
        lam = np.where(cut, 1 - area, lam)
        blend, patches = np.where(cut, 1.0, lam), None
        if augment.mix_patches:
            patches, lam = self._draw_patches(rng, lam, cut, size)
            blend = np.ones(rows)
        plan = MixPlan(lam.astype(np.float32), box, blend.astype(np.float32), patches)
        return _spread(plan, self.global_batch, augment.mix_mode)

    def _cutmix_probability(self) -> float:
        if self.augment.mixup == 0:
            return 1.0
        return self.augment.mix_switch_prob if self.augment.cutmix else 0.0

    def _draw_patches(
        self, rng: np.random.Generator, lam: npt.NDArray[np.float64], cut: npt.NDArray[np.bool_], size: tuple[int, int]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
        """Draw as many patches of the partner as `1 - lam` requires; also return the resulting fractions."""
        grid = (size[0] // self.patch[0]) * (size[1] // self.patch[1])
        count = np.where(cut, 0, np.round((1 - lam) * grid)).astype(np.int64)
        rank = np.argsort(np.argsort(rng.random((len(lam), grid)), axis=1), axis=1)
        return rank < count[:, None], np.where(cut, lam, 1 - count / grid)


def _beta(rng: np.random.Generator, alpha: float, rows: int) -> npt.NDArray[np.float64]:
    return rng.beta(alpha, alpha, rows) if alpha > 0 else np.ones(rows)


def _spread(plan: MixPlan, size: int, mode: str) -> MixPlan:
    """Expand one row per batch or pair to one row per image."""
    if mode == "elem":
        return plan
    rows = np.zeros(size, np.int64) if mode == "batch" else np.arange(size) // 2
    patches = None if plan.patches is None else plan.patches[rows]
    return MixPlan(plan.lam[rows], plan.box[rows], plan.blend[rows], patches)
