"""Matmuls and copies slower than the datasheet, or than the threads should make them, are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from vit_scale.cost.hardware import Peak
from vit_scale.doctor.check import Setup
from vit_scale.doctor.checks import compute


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cores and two threads; a matmul reaches 50 GFLOP/s on each."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(compute, "usable_cores", lambda: 2.0)
    monkeypatch.setattr(compute, "peak", lambda device: Peak(50e9 * torch.get_num_threads(), "measured"))
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_cpu_is_measured_on_all_threads_and_on_one(setup: Setup) -> None:
    (found,) = compute.matmul(dataclasses.replace(setup, quick=False))
    assert found.status == "works"
    assert found.value == "100 GFLOP/s in fp32 on 2 threads, 50 on one (no datasheet)"
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_fewer_threads_than_cores_are_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(compute, "usable_cores", lambda: 16.0)
    (found,) = compute.matmul(setup)
    assert (found.status, found.advice) == ("slow", "unset OMP_NUM_THREADS, or set it to 16")


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("alone", "together"), [(1e9, 2e9), (50e9, 51e9)], ids=["slow core", "no gain from threads"])
def test_slow_cpu_is_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup, alone: float, together: float) -> None:
    rates = {1: alone, 2: together}
    monkeypatch.setattr(compute, "peak", lambda device: Peak(rates[torch.get_num_threads()], "measured"))
    (found,) = compute.matmul(dataclasses.replace(setup, quick=False))
    assert found.status == "slow"


@pytest.fixture
def gpu_name(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """GPUs with bf16; the name that torch prints may be changed."""
    names = ["NVIDIA H100 80GB HBM3"]
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[0])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    return names


@pytest.mark.usefixtures("gpu_name")
@pytest.mark.parametrize(("measured", "status"), [(700e12, "works"), (300e12, "slow")])
def test_gpu_far_below_its_datasheet_in_the_same_precision_is_slow(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, measured: float, status: str
) -> None:
    monkeypatch.setattr(compute, "matmul_speed", lambda *_: measured if _[1].index == 1 else 700e12)
    first, second = compute.matmul(dataclasses.replace(setup, gpus=2))
    assert (first.status, second.status) == ("works", status)
    assert first.value == "700 TFLOP/s in bf16, 71% of 989 (H100 datasheet, dense bf16)"


def test_unknown_gpu_is_measured_without_a_verdict(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, gpu_name: list[str]
) -> None:
    gpu_name[0] = "X1"
    monkeypatch.setattr(compute, "matmul_speed", lambda *_: 1e12)
    (found,) = compute.matmul(dataclasses.replace(setup, gpus=1))
    assert (found.status, found.value) == ("works", "1 TFLOP/s in bf16; no datasheet for this GPU")


def test_memory_bandwidth_is_measured(setup: Setup) -> None:
    found = compute.memory(setup)
    assert found.status == "works"
    assert found.numbers["bytes_per_second"] > 1e8


def test_memory_far_below_its_datasheet_is_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(compute, "theoretical_bandwidth", lambda device: 1e15)
    assert compute.memory(setup).status == "slow"


def test_memory_bandwidth_of_a_gpu_follows_from_its_bus_and_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(memory_bus_width=5120, memory_clock_rate=2_619_000)  # H100 SXM: 3.35 TB/s
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert compute.theoretical_bandwidth(torch.device("cuda")) == pytest.approx(3.35e12, rel=1e-2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert compute.theoretical_bandwidth(torch.device("cuda")) is None
    assert compute.theoretical_bandwidth(torch.device("cpu")) is None
