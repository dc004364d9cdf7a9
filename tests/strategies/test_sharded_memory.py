"""ZeRO-3 never holds a full model on a rank: memory of building and saving, measured on two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

SHALLOW, DEEP = 2, 8
FP32 = 4
Measured = dict[tuple[str, int, int], dict[str, Any]]


@pytest.fixture(scope="module")
def measured(launch_processes: Callable[..., list[subprocess.CompletedProcess]]) -> Measured:
    """Measurements by strategy, depth and rank."""
    cases = [{"strategy": strategy, "depth": depth} for strategy in ("ddp", "zero3") for depth in (SHALLOW, DEEP)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    (done,) = launch_processes([*launcher, "tests/workers/sharded_memory.py", json.dumps(cases)], timeout=180)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("memory")]
    found = [(int(rank), json.loads(numbers)) for _, rank, numbers in lines]
    return {(numbers["strategy"], numbers["depth"], rank): numbers for rank, numbers in found}


def growth(measured: Measured, strategy: str, rank: int, key: str) -> float:
    """Return how many bytes `key` grows per byte of added parameters."""
    shallow, deep = (measured[strategy, depth, rank] for depth in (SHALLOW, DEEP))
    return (deep[key] - shallow[key]) / (FP32 * (deep["params"] - shallow["params"]))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_keeps_half_of_the_parameters(measured: Measured, rank: int) -> None:
    numbers = measured["zero3", DEEP, rank]
    assert numbers["held"] == pytest.approx(numbers["params"] / 2, rel=0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_building_never_holds_the_full_model(measured: Measured, rank: int) -> None:
    assert growth(measured, "ddp", rank, "build") == pytest.approx(1.0, abs=0.05)
    assert growth(measured, "zero3", rank, "build") < 0.7


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_saving_holds_one_full_tensor_at_a_time(measured: Measured, strategy: str, rank: int) -> None:
    numbers = measured[strategy, DEEP, rank]
    assert growth(measured, strategy, rank, "save") == pytest.approx(0.0, abs=0.01)
    assert numbers["save"] < 1.1 * FP32 * numbers["largest"]


@pytest.mark.parametrize("depth", [SHALLOW, DEEP])
def test_sharded_initial_weights_are_bit_identical(measured: Measured, depth: int) -> None:
    assert measured["zero3", depth, 0]["checksum"] == measured["ddp", depth, 0]["checksum"]
