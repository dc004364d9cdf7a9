"""Accuracy and loss, each image counted exactly once over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from vit_scale.data.batch import Batch
from vit_scale.tasks.classify.analysis import Inspection


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    inputs: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
    inspection: Inspection | None = None,
) -> dict[str, float]:
    """`loss`, `top1` and `top5` of `model` over `batches`.

    `inputs` makes of the images what the model takes; `inspection` is shown every batch.

    Counts are summed over processes before they are divided. Padding, which gives every process the same number of
    batches, is not counted.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # images, loss, top-1, top-5
    for batch in batches:
        labels, real = batch.target["label"].to(device, non_blocking=True), batch.real.to(device, non_blocking=True)
        logits_BC = model(inputs(batch.images)).float()
        sums += _batch_sums(logits_BC, labels, real.double())
        if inspection is not None:
            inspection.add(batch.images, logits_BC, labels, real)
    model.train(was_training)
    if dist.is_initialized():
        dist.all_reduce(sums)
    images_seen, loss, top1, top5 = sums.tolist()
    return {"loss": loss / images_seen, "top1": top1 / images_seen, "top5": top5 / images_seen}


def _batch_sums(logits_BC: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(logits_BC, labels, reduction="none").double()
    ranked = logits_BC.topk(min(5, logits_BC.shape[1]), dim=1).indices
    hits = ranked.eq(labels[:, None]).double()
    rows = torch.stack((torch.ones_like(loss), loss, hits[:, 0], hits.sum(1)))
    return rows @ weights
