"""The plan derived from the options: training length, batch sizes, and errors for indivisible sizes."""

from __future__ import annotations

import pytest

from vit_scale.errors import UserError
from vit_scale.recipe import build_config
from vit_scale.schedule import make_plan


def plan(processes: int = 1, images: int = 1000, **sections: dict):  # type: ignore[no-untyped-def]
    config = build_config({"schedule": {"epochs": 10}, **sections})
    return make_plan(config, train_images=images, processes=processes, device="cpu")


def test_epochs_are_converted_to_steps() -> None:
    made = plan(batch={"global": 64})
    assert made.steps == round(10 * 1000 / 64)
    assert made.epoch(made.steps) == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize(("processes", "micro"), [(1, 32), (2, 16), (4, 8), (2, 64)])
def test_processes_times_accumulation_times_micro_is_the_global_batch(processes: int, micro: int) -> None:
    made = plan(processes, batch={"global": 128, "micro": micro})
    assert made.processes * made.accumulation * made.micro_batch == 128
    assert made.steps == plan(batch={"global": 128}).steps, "length is independent of processes"


def test_auto_micro_batch_divides_the_local_batch() -> None:
    made = plan(3, batch={"global": 210})
    assert 70 % made.micro_batch == 0
    assert made.micro_batch <= 64


@pytest.mark.parametrize(("local_batch", "multiple", "micro"), [(90, 1, 45), (90, 2, 30), (45, 2, 45), (128, 2, 64)])
def test_auto_micro_batch_is_a_multiple_if_one_divides(local_batch: int, multiple: int, micro: int) -> None:
    config = build_config({"schedule": {"epochs": 10}, "batch": {"global": local_batch}})
    made = make_plan(config, train_images=1000, processes=1, device="cpu", multiple=multiple)
    assert made.micro_batch == micro
    assert made.accumulation * micro == local_batch


def test_indivisible_global_batch_error_names_the_nearest() -> None:
    with pytest.raises(UserError, match="not divisible by 3 processes; nearest values: 63 and 66"):
        plan(3, batch={"global": 64})


def test_indivisible_micro_batch_error_names_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"batch.micro = 32: .*\(batch.global = 96, 2 processes\); nearest divisors: 24 and 48"
    ):
        plan(2, batch={"global": 96, "micro": 32})


def test_warmup_longer_than_the_run_is_rejected() -> None:
    with pytest.raises(UserError, match="warmup steps exceed the 3 steps"):
        plan(schedule={"steps": 3, "warmup_epochs": 5})


def test_format_batch_size_shows_the_factors() -> None:
    text = plan(2, batch={"global": 128, "micro": 16}).format_batch_size()
    assert text == "128 (2 processes x 4 accumulation steps x 16 images)"
