"""The evaluator of means over images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vit_scale.data.batch import Batch
from vit_scale.tasks.task import Means

CPU = torch.device("cpu")


def batch_of(positions: list[int]) -> Batch:
    return Batch(torch.zeros(len(positions), 1, 2, 2, dtype=torch.uint8), {}, torch.tensor(positions))


def values_of(outputs: Any, batch: Batch) -> dict[str, torch.Tensor]:
    return {"error": outputs, "square": outputs.square()}


def test_means_are_over_all_real_images() -> None:
    outputs = torch.randn(10, generator=torch.Generator().manual_seed(0))
    evaluator = Means(values_of, CPU)
    evaluator.add(outputs[:6], batch_of([0, 1, 2, 3, 4, 5]))
    evaluator.add(torch.cat([outputs[6:], torch.full((2,), 1e6)]), batch_of([6, 7, 8, 9, -1, -1]))
    expected = {"error": outputs.double().mean().item(), "square": outputs.double().square().mean().item()}
    assert evaluator.metrics() == pytest.approx(expected, rel=1e-6)


def test_means_sum_in_float64() -> None:
    """In fp32 a sum of 2**24 absorbs further ones."""
    evaluator = Means(lambda outputs, _: {"x": outputs}, CPU)
    evaluator.add(torch.tensor([2.0**24]), batch_of([0]))
    for position in range(1, 4):
        evaluator.add(torch.ones(1), batch_of([position]))
    assert evaluator.metrics() == {"x": (2**24 + 3) / 4}


def test_means_without_batches_are_an_error() -> None:
    with pytest.raises(AssertionError, match="every rank evaluates at least one batch"):
        Means(values_of, CPU).metrics()


def test_reading_means_twice_gives_the_same_values() -> None:
    evaluator = Means(values_of, CPU)
    evaluator.add(torch.arange(4.0), batch_of([0, 1, 2, 3]))
    assert evaluator.metrics() == evaluator.metrics() == {"error": 1.5, "square": 3.5}
