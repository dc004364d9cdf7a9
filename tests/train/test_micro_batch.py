"""The micro batch: the largest that fits, of those the fastest, and halved rather than failing."""

from __future__ import annotations

import pytest
import torch

import vit_scale
from vit_scale.train.micro_batch import choose_micro_batch, trial_on_device


def memory_of(limit: int, speed=lambda size: float(size)):  # type: ignore[no-untyped-def]
    tried: list[int] = []

    def trial(size: int) -> float | None:
        tried.append(size)
        return speed(size) if size <= limit else None

    return trial, tried


def test_auto_takes_the_largest_that_fits_where_larger_is_faster() -> None:
    trial, tried = memory_of(100)
    assert choose_micro_batch("auto", 256, trial, even=False) == (64, None)
    assert tried == [1, 2, 4, 8, 16, 32, 64, 128]


def test_auto_takes_the_fastest_of_those_that_fit() -> None:
    trial, _ = memory_of(1000, speed=lambda size: 100 - abs(size - 32))
    assert choose_micro_batch("auto", 256, trial, even=False) == (32, None)


def test_auto_prefers_the_larger_of_equally_fast_ones() -> None:
    trial, _ = memory_of(1000, speed=lambda size: 100.0)
    assert choose_micro_batch("auto", 96, trial, even=False) == (96, None)


def test_sizes_divide_the_batch_and_are_even_for_mixing() -> None:
    trial, tried = memory_of(1000)
    choose_micro_batch("auto", 210, trial, even=True)
    assert all(210 % size == 0 and size % 2 == 0 for size in tried)


def test_number_that_does_not_fit_is_halved_and_said() -> None:
    trial, _ = memory_of(20)
    size, note = choose_micro_batch(64, 128, trial, even=False)
    assert size == 16
    assert note == "batch.micro = 64 does not fit into memory: 16 is used, with more accumulation."


def test_number_that_fits_is_kept() -> None:
    trial, tried = memory_of(64)
    assert choose_micro_batch(64, 128, trial, even=False) == (64, None)
    assert tried == [64]


def test_nothing_fits_is_an_error() -> None:
    trial, _ = memory_of(0)
    with pytest.raises(MemoryError, match="not even 1 images"):
        choose_micro_batch("auto", 8, trial, even=False)


def test_trial_leaves_the_model_as_it_was_and_tells_out_of_memory() -> None:
    model = vit_scale.create_model("timm/resnet10t", num_classes=3, img_size=None)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    trial = trial_on_device(model, torch.device("cpu"), "fp32", repeats=1)
    assert trial(2) > 0
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())

    def too_much(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    model.forward = too_much
    assert trial(2) is None
