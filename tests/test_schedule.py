"""From options to numbers: lengths, the batch arithmetic, and what does not divide."""

from __future__ import annotations

import pytest

from vit_scale.errors import UserError
from vit_scale.recipe import build_config
from vit_scale.schedule import make_plan


def plan(processes: int = 1, images: int = 1000, **sections: dict):  # type: ignore[no-untyped-def]
    config = build_config({"schedule": {"epochs": 10}, **sections})
    return make_plan(config, train_images=images, processes=processes, device="cpu")


def test_epochs_become_steps_of_the_global_batch() -> None:
    made = plan(batch={"global": 64})
    assert made.steps == round(10 * 1000 / 64)
    assert made.epoch(made.steps) == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize(("processes", "micro"), [(1, 32), (2, 16), (4, 8), (2, 64)])
def test_processes_times_accumulation_times_micro_is_the_global_batch(processes: int, micro: int) -> None:
    made = plan(processes, batch={"global": 128, "micro": micro})
    assert made.processes * made.accumulation * made.micro_batch == 128
    assert made.steps == plan(batch={"global": 128}).steps, "the length does not depend on processes"


def test_auto_micro_batch_divides_what_a_process_has() -> None:
    made = plan(3, batch={"global": 210})
    assert 70 % made.micro_batch == 0
    assert made.micro_batch <= 64


def test_batch_that_does_not_divide_over_processes_names_the_nearest() -> None:
    with pytest.raises(UserError, match="does not divide over 3 processes; nearest that do: 63 and 66"):
        plan(3, batch={"global": 64})


def test_micro_batch_that_does_not_divide_a_process_names_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"batch.micro = 32: .*\(batch.global = 96 over 2\); nearest that do: 24 and 48"
    ):
        plan(2, batch={"global": 96, "micro": 32})


def test_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(UserError, match="longer than the run"):
        plan(schedule={"steps": 3, "warmup_epochs": 5})


def test_batch_in_words_is_the_arithmetic() -> None:
    words = plan(2, batch={"global": 128, "micro": 16}).batch_in_words()
    assert words == "128 images an update = 2 processes x 4 forward passes x 16 images"
