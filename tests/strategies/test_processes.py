"""What each process of a node may use: its GPU and its share of the cores."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vit_scale.errors import UserError
from vit_scale.recipe import load_recipe
from vit_scale.strategies.processes import own_cores, own_device, share_of_cores
from vit_scale.train import build

ALL = set(range(96))


@pytest.mark.parametrize(
    ("own", "processes", "expected"),
    [
        (ALL, [ALL] * 8, 12),  # torchrun: all processes share the node
        (set(range(12, 24)), [set(range(12 * i, 12 * i + 12)) for i in range(8)], 12),  # srun: each has its own
        (set(range(48)), [set(range(48))] * 4 + [set(range(48, 96))] * 4, 12),  # bound by socket
        ({0}, [{0}] * 8, 1),
    ],
)
def test_cores_are_divided_only_between_processes_that_share_them(
    own: set[int], processes: list[set[int]], expected: int
) -> None:
    assert share_of_cores(own, processes) == expected


def test_cores_of_other_nodes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: ALL, raising=False)

    def gather(everyone: list[Any], own: Any) -> None:
        everyone[:] = [own, own, (("node-2", None), ALL), (("node-2", None), ALL)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert own_cores() == 48


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A process that sees eight GPUs; returns the ones it makes current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    return current


def test_each_rank_tries_the_kernel_on_its_own_gpu(eight_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(build, "check_attention_kernel", lambda kernel, device, **_: tried.append((kernel, device)))
    decided = build._decide(load_recipe("recipes/debug.yaml", ["model.kernel=flash"]))
    assert tried == [("flash", torch.device("cuda", 5))]
    assert eight_gpus == [5], "before anything else can allocate memory"
    assert (decided.device, decided.precision) == ("cuda", "bf16")


def test_more_processes_than_gpus_are_reported(eight_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(UserError, match="LOCAL_RANK = 8: only 8 GPUs are visible; start at most one process per GPU"):
        own_device()
