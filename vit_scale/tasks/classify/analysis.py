"""Images of an evaluation: the misclassified ones with the highest loss, and a few fixed ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

MAX_MISCLASSIFIED = 16
FIXED_IMAGES = 8


@dataclass(frozen=True)
class Misclassified:
    """An image that the model classifies incorrectly."""

    image: torch.Tensor
    """uint8 [C, H, W]"""
    label: int
    predicted: int
    probability: float
    """Probability of the predicted class."""
    loss: float


class ErrorAnalysis:
    """Keeps images of one evaluation."""

    def __init__(self) -> None:
        self._worst: list[Misclassified] = []
        self._fixed: dict[int, torch.Tensor] = {}
        self._any: torch.Tensor | None = None

    def add(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        predicted: torch.Tensor,
        probability: torch.Tensor,
        loss: torch.Tensor,
        real: torch.Tensor,
    ) -> None:
        """Add a batch: uint8 images on the host, the rest on the device. `real` is False for padding."""
        wrong = torch.where(real & (predicted != labels), loss, -1.0)
        rows = torch.stack([wrong, labels.float(), predicted.float(), probability, real.float()], 1).cpu()
        self._keep_worst(images, rows)
        self._keep_fixed(images, rows)

    def _keep_worst(self, images: torch.Tensor, rows: torch.Tensor) -> None:
        limit = self._worst[-1].loss if len(self._worst) == MAX_MISCLASSIFIED else 0.0
        for index in rows[:, 0].argsort(descending=True)[:MAX_MISCLASSIFIED].tolist():
            loss, label, predicted, probability, _ = rows[index].tolist()
            if loss > limit:
                # The loader reuses its memory for another batch.
                image = images[index].clone()
                self._worst.append(Misclassified(image, int(label), int(predicted), probability, loss))
        self._worst = _highest_loss(self._worst)

    def _keep_fixed(self, images: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep the first image of each of the first classes: the same ones in every evaluation."""
        if self._any is None:
            self._any = images[:1].clone()
        for index, (label, real) in enumerate(rows[:, [1, 4]].tolist()):
            if len(self._fixed) == FIXED_IMAGES:
                return
            if real and label not in self._fixed:
                self._fixed[int(label)] = images[index].clone()

    def worst(self) -> list[Misclassified]:
        """Return the images with the highest loss over all ranks, on the main rank; every rank must call it."""
        if not dist.is_initialized():
            return self._worst
        losses: list[list[float]] = [[]] * dist.get_world_size()
        dist.all_gather_object(losses, [each.loss for each in self._worst])
        ranked = sorted((loss for found in losses for loss in found), reverse=True)[:MAX_MISCLASSIFIED]
        # Send only images that will be shown.
        shown = [each for each in self._worst if ranked and each.loss >= ranked[-1]]
        main = dist.get_rank() == 0
        gathered: list[list[Misclassified]] | None = [[]] * dist.get_world_size() if main else None
        dist.gather_object(shown, gathered)
        return _highest_loss([each for found in gathered or [] for each in found])

    def fixed_images(self) -> tuple[torch.Tensor, list[int]]:
        """Return images of this rank [B, C, H, W], at least one, and their classes, which padding does not have."""
        if self._fixed:
            return torch.stack(list(self._fixed.values())), list(self._fixed)
        assert self._any is not None
        return self._any, []


def _highest_loss(found: list[Misclassified]) -> list[Misclassified]:
    return sorted(found, key=lambda each: each.loss, reverse=True)[:MAX_MISCLASSIFIED]
