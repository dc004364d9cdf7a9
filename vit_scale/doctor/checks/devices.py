"""The CPU and the GPUs: what there is, and whether torch can use it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

from vit_scale.doctor.check import Check, Setup, broken, skipped, slow, works
from vit_scale.errors import first_line
from vit_scale.format import memory_size

CGROUP = Path("/sys/fs/cgroup")
GPU_FILES = ("/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/kfd")
"""Files of the drivers of NVIDIA and AMD."""
BUSY_FRACTION = 0.1
"""Of a GPU's memory, held by others."""


def cpu(setup: Setup) -> Check:
    """Describe the CPU and the part of it that this process may use."""
    import torch

    cores, allowed = os.cpu_count() or 1, usable_cores()
    vectors, memory = torch.backends.cpu.get_cpu_capability(), memory_limit()
    value = f"{_cpu_name()}, {allowed:g} of {cores} cores, {memory_size(memory)}, {vectors}"
    numbers: dict[str, Any] = {"cores": cores, "usable_cores": allowed, "memory_bytes": memory, "vectors": vectors}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if vectors in ("DEFAULT", "NO AVX"):
        return slow("cpu", f"{value} instructions only", "torch runs without AVX2 here; use another CPU", **numbers)
    if load > 1.5 * cores:
        advice = "other programs use the CPU: the speeds below are too low"
        return slow("cpu", f"{value}, load average {load:.1f}", advice, **numbers)
    if allowed < torch.get_num_threads():
        advice = f"set OMP_NUM_THREADS={max(1, int(allowed))}: a quota stops threads in turn, and all wait for each"
        return slow("cpu", f"{value}, but torch uses {torch.get_num_threads()} threads", advice, **numbers)
    return works("cpu", value, **numbers)


def gpus(setup: Setup) -> list[Check]:
    """Check that torch computes on every GPU."""
    import torch

    if torch.cuda.is_available():
        driver = _driver()
        return [_gpu(i, driver) for i in range(torch.cuda.device_count())]
    reason = why_no_gpu()
    if reason is None:
        return [skipped("gpu", "no GPU")]
    return [broken("gpu", *reason)]


def why_no_gpu() -> tuple[str, str] | None:
    """Return why torch sees no GPU although there is one, and what to do; None if there is none."""
    import torch

    found = next((path for path in GPU_FILES if Path(path).exists()), None)
    if found is None and shutil.which("nvidia-smi") is None:
        return None
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if os.environ.get(name) in ("", "-1"):
            return f"hidden by {name}={os.environ[name]!r}", f"unset {name}"
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"this machine has a GPU, but torch {torch.__version__} is built for CPUs only",
            "install a build for GPUs: https://pytorch.org/get-started/locally",
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error), "update the driver, or install a torch for its CUDA version"
    return "torch sees no GPU although there is a driver", "run nvidia-smi; in a container pass --gpus all"


def _gpu(index: int, driver: str) -> Check:
    """Compute on a GPU and describe it."""
    import torch

    name = f"gpu {index}"
    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}"
    try:
        total = torch.arange(1000, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        built = ", ".join(torch.cuda.get_arch_list())
        return broken(name, f"{properties.name} ({arch}): {first_line(error)}", f"this torch is built for {built}")
    if total != 499_500:
        return broken(name, f"{properties.name}: a sum is wrong", "take this GPU out of service")
    free, memory = torch.cuda.mem_get_info(index)
    value = f"{properties.name}, {memory_size(memory)}, {arch}, driver {driver}"
    numbers: dict[str, Any] = {"model": properties.name, "memory_bytes": memory, "free_bytes": free, "driver": driver}
    if memory - free > BUSY_FRACTION * memory + 2**30:
        advice = (
            "other processes use this GPU (nvidia-smi lists them): end them, or choose GPUs by CUDA_VISIBLE_DEVICES"
        )
        return slow(name, f"{value}, {memory_size(memory - free)} in use", advice, **numbers)
    return works(name, value, **numbers)


def _driver() -> str:
    """Return the version of the GPU driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return asked.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        import torch

        return f"unknown, torch for CUDA {torch.version.cuda}" if torch.version.cuda else "unknown"


def usable_cores() -> float:
    """Return the cores that this process may use: its affinity, within the quota of its container."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: all, or the limit of its container."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int((CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):
        return total


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
