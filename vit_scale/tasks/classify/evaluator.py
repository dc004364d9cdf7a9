"""Everything that one pass over labelled images tells: accuracy, loss, confusion, calibration.

Shapes: B batch, C classes, K the five best of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vit_scale.data.batch import Batch
from vit_scale.tasks.classify.calibration import BINS, Calibration, bin_sums, from_sums

_SCALARS = 4  # images, loss, top-1, top-5


@dataclass(frozen=True)
class ClassResult:
    """How one class fared."""

    name: str
    images: int
    recall: float | None
    """Share of its images that were recognised, which is its accuracy; None without images."""
    precision: float | None
    """Share of right ones among the images that were taken for it; None where there were none."""
    mistaken_for: str | None
    """The class that its other images were most often taken for."""


@dataclass(frozen=True)
class Evaluation:
    """What came out, over all processes."""

    images: int
    loss: float
    top1: float
    top5: float
    confusion: Tensor
    """int64 [true class, predicted class]"""
    calibration: Calibration
    images_per_second: float
    class_names: tuple[str, ...]

    def classes(self) -> list[ClassResult]:
        """One row for each class, in the model's order."""
        true, predicted, right = self.confusion.sum(1), self.confusion.sum(0), self.confusion.diagonal()
        errors = self.confusion.clone().fill_diagonal_(0)
        worst = errors.argmax(1)
        return [
            ClassResult(
                name=name,
                images=int(true[i]),
                recall=float(right[i] / true[i]) if true[i] else None,
                precision=float(right[i] / predicted[i]) if predicted[i] else None,
                mistaken_for=self.class_names[int(worst[i])] if errors[i, worst[i]] else None,
            )
            for i, name in enumerate(self.class_names)
        ]

    def numbers(self) -> dict[str, Any]:
        """The results as plain numbers, accuracies as fractions of 1."""
        return {
            "images": self.images,
            "top1": self.top1,
            "top5": self.top5,
            "loss": self.loss,
            "calibration_error": self.calibration.error,
            "calibration_bins": BINS,
            "overconfidence": self.calibration.overconfidence,
            "images_per_second": self.images_per_second,
        }


@torch.inference_mode()
def score(
    model: nn.Module,
    batches: Iterable[Batch],
    inputs: Callable[[Tensor], Tensor],
    *,
    class_names: tuple[str, ...],
    device: torch.device,
    relabel: Tensor | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Evaluation:
    """One pass of `model`, in evaluation mode, over batches.

    `inputs` makes of the images what the model takes. `relabel` has the model's class for each label of the data.
    `advance` is called after each batch. Counts are summed over processes before they are divided; padding is
    not counted.
    """
    classes = len(class_names)
    # In one tensor, so that the processes speak to one another once.
    sums = torch.zeros(_SCALARS + 3 * BINS + classes * classes, dtype=torch.float64, device=device)
    scalars, bins, confusion = sums.split((_SCALARS, 3 * BINS, classes * classes))
    started = time.perf_counter()
    for batch in batches:
        labels, weights = batch.target["label"].to(device), batch.real.to(device).double()
        if relabel is not None:
            labels = relabel[labels]
        logits_BC = model(inputs(batch.images)).float()
        ranked_BK = logits_BC.topk(min(5, classes), dim=1).indices
        scalars += _batch_sums(logits_BC, ranked_BK, labels, weights)
        confidence_B = logits_BC.softmax(1).amax(1)
        bins += bin_sums(confidence_B, ranked_BK[:, 0] == labels, weights).view(-1)
        confusion.index_add_(0, labels * classes + ranked_BK[:, 0], weights)
        advance()
    if dist.is_initialized():
        dist.all_reduce(sums)
    return _evaluation(scalars, bins, confusion, time.perf_counter() - started, class_names)


def _batch_sums(logits_BC: Tensor, ranked_BK: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    loss = F.cross_entropy(logits_BC, labels, reduction="none").double()
    hits = ranked_BK.eq(labels[:, None]).double()
    return torch.stack((torch.ones_like(loss), loss, hits[:, 0], hits.sum(1))) @ weights


def _evaluation(
    scalars: Tensor, bins: Tensor, confusion: Tensor, seconds: float, class_names: tuple[str, ...]
) -> Evaluation:
    images, loss, top1, top5 = scalars.tolist()
    count = max(1.0, images)
    return Evaluation(
        images=round(images),
        loss=loss / count,
        top1=top1 / count,
        top5=top5 / count,
        confusion=confusion.round().long().cpu().view(len(class_names), len(class_names)),
        calibration=from_sums(bins.view(3, BINS)),
        images_per_second=images / seconds,
        class_names=class_names,
    )
