"""Evaluation batches made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from vit_scale.data.batch import Batch, DataInfo
from vit_scale.recipe import build_config
from vit_scale.tasks.classify.classification import Classification
from vit_scale.tasks.classify.evaluator import ClassificationEvaluator

Evaluate = Callable[..., ClassificationEvaluator]


@pytest.fixture
def evaluate() -> Evaluate:
    """Evaluate logits in batches, the last of which ends with padding, as the loader returns them."""

    def run(
        logits: torch.Tensor, labels: torch.Tensor, names: Sequence[str], *, inspect: bool = True, batch: int = 16
    ) -> ClassificationEvaluator:
        task = Classification(build_config({"schedule": {"steps": 1}}), DataInfo(len(labels), 1, tuple(names)))
        evaluator = task.evaluator(inspect=inspect)
        for start in range(0, len(labels), batch):
            positions = torch.arange(start, start + batch)
            positions = positions.where(positions < len(labels), -1)
            index = positions.clamp(min=0)
            images = index.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).clone()
            padded = labels[index].where(positions >= 0, 0)
            evaluator.add(logits[index], Batch(images, {"label": padded}, positions))
        return evaluator

    return run
