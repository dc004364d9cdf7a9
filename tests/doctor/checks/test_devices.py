"""A CPU that is shared or slow, and GPUs that torch cannot use, are found."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vit_scale.doctor.check import Setup
from vit_scale.doctor.checks import devices


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def test_cpu_is_described(setup: Setup) -> None:
    found = devices.cpu(setup)
    assert found.numbers["cores"] == os.cpu_count()
    assert found.numbers["memory_bytes"] > 0


def test_busy_cpu_is_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (100.0, 0.0, 0.0))
    found = devices.cpu(setup)
    assert found.status == "slow"
    assert "load average 100" in found.value


def test_cpu_without_vector_instructions_is_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert devices.cpu(setup).status == "slow"


def test_quota_of_a_container_is_respected(monkeypatch: pytest.MonkeyPatch, setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    found = devices.cpu(setup)
    assert (found.status, found.numbers["usable_cores"], found.numbers["memory_bytes"]) == ("slow", 0.5, 1_000_000)
    assert "OMP_NUM_THREADS=1" in found.advice
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.usable_cores() >= 1
    assert devices.memory_limit() > 1_000_000


def test_machine_without_gpu_skips_gpus(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(devices, "GPU_FILES", ())
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert [(each.status, each.value) for each in devices.gpus(setup)] == [("skipped", "no GPU")]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a driver, whose GPUs torch does not see."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "GPU_FILES", (str(tmp_path / "nvidia0"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("driver")
def test_gpu_beside_a_torch_for_cpus_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    (found,) = devices.gpus(setup)
    assert (found.status, found.required) == ("broken", True)
    assert "is built for CPUs only" in found.value


@pytest.mark.usefixtures("driver")
def test_driver_that_is_too_old_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    def fails() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fails)
    (found,) = devices.gpus(setup)
    assert found.status == "broken"
    assert "driver on your system is too old" in found.value


@pytest.mark.usefixtures("driver")
def test_hidden_gpu_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = devices.gpus(setup)
    assert (found.status, found.advice) == ("broken", "unset CUDA_VISIBLE_DEVICES")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> Setup:
    """A machine with one H100, as far as torch can be asked."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    arange = torch.arange
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_80"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (79 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch, "arange", lambda n, device: arange(n))
    monkeypatch.setattr(devices, "_driver", lambda: "570.10")
    return dataclasses.replace(setup, gpus=1)


def test_gpu_is_described(gpu: Setup) -> None:
    (found,) = devices.gpus(gpu)
    assert found.status == "works"
    assert found.value == "NVIDIA H100 80GB HBM3, 80.0 GiB, sm_90, driver 570.10"


def test_gpu_that_torch_is_not_built_for_is_broken(monkeypatch: pytest.MonkeyPatch, gpu: Setup) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "arange", fails)
    (found,) = devices.gpus(gpu)
    assert found.status == "broken"
    assert "no kernel image" in found.value
    assert found.advice == "this torch is built for sm_70, sm_80"


def test_gpu_that_computes_wrongly_is_broken(monkeypatch: pytest.MonkeyPatch, gpu: Setup) -> None:
    monkeypatch.setattr(torch, "arange", lambda n, device: torch.ones(n))
    assert devices.gpus(gpu)[0].status == "broken"


def test_gpu_that_others_use_is_slow(monkeypatch: pytest.MonkeyPatch, gpu: Setup) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (40 * 2**30, 80 * 2**30))
    (found,) = devices.gpus(gpu)
    assert found.status == "slow"
    assert "40.0 GiB in use" in found.value
