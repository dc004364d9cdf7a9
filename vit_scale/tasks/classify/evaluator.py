"""Accuracy, loss, confusion and calibration of one pass over labeled images.

Shapes: B batch, C classes, K the five most probable of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_scale.data.batch import Batch
from vit_scale.errors import first_line
from vit_scale.format import percent
from vit_scale.models.attention_weights import attention_maps
from vit_scale.tasks.classify.analysis import ErrorAnalysis
from vit_scale.tasks.classify.calibration import BINS, Calibration, bin_sums, from_sums
from vit_scale.tasks.classify.confusion import Confusion, confusion_table
from vit_scale.tasks.classify.image_grids import attention_grid, misclassified_grid
from vit_scale.tasks.task import Evaluator, Show, Table, sum_over_ranks

if TYPE_CHECKING:
    from vit_scale.tasks.classify.classification import Classification

_SCALARS = 4  # images, loss, top-1, top-5


@dataclass(frozen=True)
class ClassResult:
    """Results of one class."""

    name: str
    images: int
    recall: float | None
    """Fraction of its images that were recognized, which is its accuracy; None without images."""
    precision: float | None
    """Fraction of correct predictions among the predictions of this class; None if it was never predicted."""
    mistaken_for: str | None
    """The class that its other images were most often confused with."""


class ClassificationEvaluator(Evaluator):
    """Sums over all images; with `inspect` also confusion, calibration, the worst errors and a few fixed images."""

    def __init__(self, task: Classification, *, inspect: bool) -> None:
        self.task, self.classes, self.names = task, task.num_classes, task.output_names
        self._sums = torch.zeros(_SCALARS + (3 * BINS if inspect else 0), dtype=torch.float64, device=task.device)
        self.confusion = Confusion(self.classes) if inspect else None
        self.analysis = ErrorAnalysis() if inspect else None

    def add(self, outputs: Tensor, batch: Batch) -> None:
        logits_BC = outputs.float()
        labels = batch.target["label"].to(logits_BC.device, non_blocking=True)
        real = batch.positions.to(logits_BC.device, non_blocking=True) >= 0
        loss_B = F.cross_entropy(logits_BC, labels, reduction="none")
        ranked_BK = logits_BC.topk(min(5, logits_BC.shape[1]), dim=1).indices
        self._sums[:_SCALARS] += _batch_sums(loss_B.double(), ranked_BK.eq(labels[:, None]).double(), real.double())
        if self.confusion is None or self.analysis is None:
            return
        probability_B, predicted_B = logits_BC.softmax(1).amax(1), ranked_BK[:, 0]
        self._sums[_SCALARS:] += bin_sums(probability_B, predicted_B == labels, real.double()).view(-1)
        self.confusion.add(labels, predicted_B, real)
        self.analysis.add(batch.images, labels, predicted_B, probability_B, loss_B, real)

    def metrics(self) -> dict[str, float]:
        images, loss, top1, top5 = self._totals[:_SCALARS].tolist()
        count = max(1.0, images)
        return {"top1": top1 / count, "top5": top5 / count, "loss": loss / count}

    def show(self, out: Show) -> None:
        """Show the confusion matrix, the worst errors and attention maps."""
        assert self.confusion is not None
        out.table(confusion_table(self.confusion, self.names))
        self._show_errors(out)

    def report(self, out: Show) -> dict[str, Any]:
        """Also show a row per class and the reliability diagram; return calibration numbers."""
        assert self.confusion is not None
        matrix = self.confusion.matrix()
        rows = [list(asdict(row).values()) for row in class_results(matrix, self.names)]
        columns = [field.name for field in fields(ClassResult)]
        fractions = ["recall", "precision"]
        out.table(Table("classes", "Results per class", columns, rows, weakest="recall", percent=fractions))
        out.table(Table("confusion", "Confusion matrix", list(self.names), matrix.tolist(), matrix=True))
        title = f"top-1 {percent(self.metrics()['top1'])} of {self.images:,} images"
        self._show_figures(out, matrix, title)
        self._show_errors(out)
        return {
            "calibration_error": self.calibration.error,
            "calibration_bins": BINS,
            "overconfidence": self.calibration.overconfidence,
        }

    def notes(self) -> dict[str, str]:
        calibration = self.calibration
        return {"calibration": f"error {percent(calibration.error)} (ECE, {BINS} bins): {calibration.note()}"}

    @property
    def images(self) -> int:
        """Images evaluated, over all ranks."""
        return round(self._totals[0].item())

    @cached_property
    def calibration(self) -> Calibration:
        """Calibration over all ranks; needs `inspect`."""
        return from_sums(self._totals[_SCALARS:].view(3, BINS))

    @cached_property
    def _totals(self) -> Tensor:
        """Sums over all ranks, in one exchange; every rank must ask for them, after the last batch."""
        return sum_over_ranks(self._sums)

    def _show_errors(self, out: Show) -> None:
        assert self.analysis is not None
        worst = self.analysis.worst()
        images, labels = self.analysis.fixed_images()
        maps = self._attention_maps(out, images)
        if worst:
            out.image(
                "mistakes",
                lambda: misclassified_grid(worst, self.names),
                title="Misclassified images",
                caption="validation images with the highest loss",
            )
        if maps is not None and labels:
            out.image(
                "attention",
                lambda: attention_grid(images, maps, labels, self.names),
                title="Attention",
                caption="attention maps of the last block, on fixed validation images",
            )

    def _attention_maps(self, out: Show, images: Tensor) -> Tensor | None:
        """Return attention maps. An unfamiliar model may fail here in any way, which must not stop a run."""
        task = self.task
        try:
            return attention_maps(out.model, task.normalize(images.to(task.device)).to(task.dtype))
        except Exception as error:  # noqa: BLE001
            out.info(f"No attention maps: {first_line(error)}.")
            return None

    def _show_figures(self, out: Show, matrix: Tensor, title: str) -> None:
        from vit_scale.tasks.classify.figures import confusion_figure, reliability_figure, to_image

        calibration = self.calibration
        out.image(
            "confusion",
            lambda: to_image(confusion_figure(matrix.numpy(), self.names, title)),
            title="Confusion matrix",
            caption=title,
        )
        out.image(
            "reliability",
            lambda: to_image(reliability_figure(calibration, title)),
            title="Reliability diagram",
            caption=title,
        )


def class_results(confusion: Tensor, names: tuple[str, ...]) -> list[ClassResult]:
    """Return one result per class, in the model's order, from counts [true class, predicted class]."""
    true, predicted, right = confusion.sum(1), confusion.sum(0), confusion.diagonal()
    errors = confusion.clone().fill_diagonal_(0)
    worst = errors.argmax(1)
    return [
        ClassResult(
            name=name,
            images=int(true[i]),
            recall=float(right[i] / true[i]) if true[i] else None,
            precision=float(right[i] / predicted[i]) if predicted[i] else None,
            mistaken_for=names[int(worst[i])] if errors[i, worst[i]] else None,
        )
        for i, name in enumerate(names)
    ]


def _batch_sums(loss_B: Tensor, hits_BK: Tensor, weights_B: Tensor) -> Tensor:
    """Images, loss, top-1 and top-5 hits of a batch."""
    return torch.stack((torch.ones_like(loss_B), loss_B, hits_BK[:, 0], hits_BK.sum(1))) @ weights_B
