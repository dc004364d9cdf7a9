"""One pass over the validation images, for training and launch/eval.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from vit_scale.data.batch import Batch
from vit_scale.tasks.task import Evaluator, Task


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    inspect: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> Evaluator:
    """Evaluate `model` on `batches` in evaluation mode; `advance` is called after each batch and may raise.

    Every rank must call it, with the same number of batches; padding counts for nothing.
    """
    share_running_statistics(model)
    evaluator = task.evaluator(inspect=inspect)
    training = model.training
    model.eval()
    try:
        for batch in batches:
            evaluator.add(task.predict(model, batch), batch)
            advance()
    finally:
        model.train(training)
    return evaluator


def share_running_statistics(model: nn.Module) -> None:
    """Give every rank the running statistics of rank 0, for models with BatchNorm; every rank must call it.

    In training each rank computes its own from its images and does not read them. Checkpoints have those of rank 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for module in model.modules():
        if getattr(module, "running_var", None) is not None:
            for statistic in module.buffers(recurse=False):
                dist.broadcast(statistic, src=0)
