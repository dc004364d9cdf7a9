"""Collectives that are slow or give wrong sums are found. Two real processes: tests/doctor/test_doctor.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vit_scale.doctor.check import Check, Setup
from vit_scale.doctor.checks import communication
from vit_scale.strategies.processes import Processes

COLLECTIVES = [communication.all_reduce, communication.sharded, communication.signals]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(communication, "join_processes", lambda: Processes(torch.device("cpu"), 0, 1))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_right_collectives_work(monkeypatch: pytest.MonkeyPatch, setup: Setup, collective: Callable) -> None:
    monkeypatch.setitem(communication.SLOW_BYTES_PER_SECOND, "cpu", 0)  # One rank sends nothing.
    assert collective(setup).status == "works"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_gpu_has_nobody_to_talk_to(setup: Setup, collective: Callable) -> None:
    assert collective(dataclasses.replace(setup, gpus=1)).status == "skipped"


@pytest.mark.parametrize(
    ("collective", "operation"),
    [
        (communication.all_reduce, "all_reduce"),
        (communication.sharded, "all_gather_into_tensor"),
        (communication.sharded, "reduce_scatter_tensor"),
        (communication.signals, "all_reduce"),
    ],
)
def test_wrong_values_are_broken(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, collective: Callable[[Setup], Check], operation: str
) -> None:
    right = getattr(dist, operation)

    def wrong(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        right(tensor, *args, **options)
        tensor.view(-1)[-1] += 1

    monkeypatch.setattr(dist, operation, wrong)
    found = collective(setup)
    assert (found.status, found.required) == ("broken", True)
    assert "wrong values" in found.value


def test_slow_all_reduce_is_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(communication, "_seconds", lambda collective, here: 10.0)
    assert communication.all_reduce(setup).status == "slow"


def test_gpus_that_communicate_through_the_host_are_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    assert communication.peer_access(setup).status == "skipped"
    eight = dataclasses.replace(setup, gpus=8)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
    assert communication.peer_access(eight).value == "all 56 pairs of GPUs"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: i // 4 == j // 4)
    found = communication.peer_access(eight)
    assert (found.status, found.value.split(" pairs")[0]) == ("slow", "32 of 56")
