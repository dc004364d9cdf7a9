"""What is looked at in an evaluation besides its numbers: confusions, the worst mistakes, and a few fixed images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from vit_scale.tasks.classify.confusion import Confusion

MOST_MISTAKES = 16
FIXED_IMAGES = 8


@dataclass(frozen=True)
class Mistake:
    """An image that the model gets wrong."""

    image: torch.Tensor
    """uint8 [C, H, W]"""
    label: int
    predicted: int
    probability: float
    """Of the predicted class."""
    loss: float


class Inspection:
    """Looks at the batches of one evaluation."""

    def __init__(self, classes: int) -> None:
        self.confusion = Confusion(classes)
        self._mistakes: list[Mistake] = []
        self._fixed: dict[int, torch.Tensor] = {}
        self._any: torch.Tensor | None = None

    def add(self, images: torch.Tensor, logits_BC: torch.Tensor, labels: torch.Tensor, real: torch.Tensor) -> None:
        """A batch: uint8 images on the host, the rest on the device. `real` is False for padding."""
        probability, predicted = logits_BC.softmax(1).max(1)
        loss = F.cross_entropy(logits_BC, labels, reduction="none")
        self.confusion.add(labels, predicted, real)
        wrong = torch.where(real & (predicted != labels), loss, -1.0)
        rows = torch.stack([wrong, labels.float(), predicted.float(), probability, real.float()], 1).cpu()
        self._keep_worst(images, rows)
        self._keep_fixed(images, rows)

    def _keep_worst(self, images: torch.Tensor, rows: torch.Tensor) -> None:
        limit = self._mistakes[-1].loss if len(self._mistakes) == MOST_MISTAKES else 0.0
        for index in rows[:, 0].argsort(descending=True)[:MOST_MISTAKES].tolist():
            loss, label, predicted, probability, _ = rows[index].tolist()
            if loss > limit:
                # The loader uses its memory again for another batch.
                image = images[index].clone()
                self._mistakes.append(Mistake(image, int(label), int(predicted), probability, loss))
        self._mistakes = _worst(self._mistakes)

    def _keep_fixed(self, images: torch.Tensor, rows: torch.Tensor) -> None:
        """The first image of each of the first classes: the same ones in every evaluation."""
        if self._any is None:
            self._any = images[:1].clone()
        for index, (label, real) in enumerate(rows[:, [1, 4]].tolist()):
            if len(self._fixed) == FIXED_IMAGES:
                return
            if real and label not in self._fixed:
                self._fixed[int(label)] = images[index].clone()

    def mistakes(self) -> list[Mistake]:
        """The worst over all processes, on the main one; all must call it."""
        if not dist.is_initialized():
            return self._mistakes
        losses: list[list[float]] = [[]] * dist.get_world_size()
        dist.all_gather_object(losses, [mistake.loss for mistake in self._mistakes])
        ranked = sorted((loss for found in losses for loss in found), reverse=True)[:MOST_MISTAKES]
        # Only images that will be shown are sent.
        shown = [mistake for mistake in self._mistakes if ranked and mistake.loss >= ranked[-1]]
        main = dist.get_rank() == 0
        gathered: list[list[Mistake]] | None = [[]] * dist.get_world_size() if main else None
        dist.gather_object(shown, gathered)
        return _worst([mistake for found in gathered or [] for mistake in found])

    def fixed_images(self) -> tuple[torch.Tensor, list[int]]:
        """Images of this process [B, C, H, W], at least one, and their classes; padding alone has none."""
        if self._fixed:
            return torch.stack(list(self._fixed.values())), list(self._fixed)
        assert self._any is not None
        return self._any, []


def _worst(mistakes: list[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda mistake: mistake.loss, reverse=True)[:MOST_MISTAKES]
