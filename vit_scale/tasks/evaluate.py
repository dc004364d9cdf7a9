"""One pass over the validation images, for training and launch/eval.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
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
    """Evaluate `model` on `batches` in evaluation mode; `advance` is called after each batch.

    Every rank must call it, with the same number of batches; padding counts for nothing.
    """
    evaluator = task.evaluator(inspect=inspect)
    training = model.training
    model.eval()
    for batch in batches:
        evaluator.add(task.predict(model, batch), batch)
        advance()
    model.train(training)
    return evaluator
