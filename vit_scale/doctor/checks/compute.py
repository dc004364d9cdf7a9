"""Matmul and memory speed, beside the datasheet."""

from __future__ import annotations

from typing import Any

import torch

from vit_scale.cost.hardware import peak
from vit_scale.doctor.check import Check, Setup, slow, works
from vit_scale.doctor.checks.devices import usable_cores
from vit_scale.doctor.checks.precision import fastest, matmul_speed
from vit_scale.format import percent
from vit_scale.strategies.precision import resolve_precision

WORTHWHILE_FRACTION = 0.5
"""Large matmuls reach 60 to 85% of the datasheet on healthy GPUs."""
SLOW_CPU_FLOPS_PER_CORE = 10e9
"""Any core with AVX2 does more."""
THREADS_GAIN = 0.6
"""Of the number of threads, which a matmul should gain from them."""


def matmul(setup: Setup) -> list[Check]:
    """Measure a large matmul on each GPU in the precision of training, or on the CPU."""
    if not setup.gpus:
        return [_matmul_on_cpu(setup)]
    return [_matmul_on_gpu(index) for index in range(setup.gpus)]


def _matmul_on_gpu(index: int) -> Check:
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    name, precision = f"matmul gpu {index}", resolve_precision("auto", device)
    datasheet = peak(device, precision)
    measured = matmul_speed(precision, device, 8192)
    numbers: dict[str, Any] = {"flops": measured, "datasheet": datasheet.flops}
    value = f"{measured / 1e12:,.0f} TFLOP/s in {precision}"
    if datasheet.flops is None:
        return works(name, f"{value}; no datasheet for this GPU", **numbers)
    fraction = measured / datasheet.flops
    value += f", {percent(fraction, 0)} of {datasheet.flops / 1e12:,.0f} ({datasheet.source})"
    if fraction < WORTHWHILE_FRACTION:
        advice = "look at power limit, clocks, temperature and other processes: nvidia-smi -q -d PERFORMANCE,POWER"
        return slow(name, value, advice, **numbers)
    return works(name, value, **numbers)


def _matmul_on_cpu(setup: Setup) -> Check:
    threads, measured = torch.get_num_threads(), peak(torch.device("cpu")).flops or 0.0
    torch.set_num_threads(1)
    try:
        alone = peak(torch.device("cpu")).flops or 0.0
    finally:
        torch.set_num_threads(threads)
    value = f"{measured / 1e9:,.0f} GFLOP/s in fp32 on {threads} threads, {alone / 1e9:,.0f} on one (no datasheet)"
    numbers: dict[str, Any] = {"flops": measured, "flops_one_thread": alone, "threads": threads}
    cores = int(usable_cores())
    if threads < cores:
        return slow("matmul", f"{value}; {cores} cores", f"unset OMP_NUM_THREADS, or set it to {cores}", **numbers)
    if alone < SLOW_CPU_FLOPS_PER_CORE:
        return slow(
            "matmul", value, "this CPU, or what else runs on it, is too slow to train anything large", **numbers
        )
    if threads > 1 and measured < THREADS_GAIN * threads * alone and not setup.quick:
        advice = "other programs use the cores, or they are hyperthreads of fewer cores"
        return slow("matmul", value, advice, **numbers)
    return works("matmul", value, **numbers)


def memory(setup: Setup) -> Check:
    """Measure how fast a large tensor is copied: most of a block except its matmuls is bound by that."""
    device = torch.device(setup.device)
    size = 2**30 if setup.gpus else 2**25 if setup.quick else 2**28
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    source.fill_(1), target.fill_(0)
    rate = 2 * size / fastest(lambda: target.copy_(source), device, 5)
    value = f"{rate / 1e9:,.0f} GB/s read and written by a copy"
    limit = theoretical_bandwidth(device)
    if limit is None:
        return works("memory bandwidth", f"{value} (no datasheet)", bytes_per_second=rate)
    value += f", {percent(rate / limit, 0)} of {limit / 1e9:,.0f} (bus width x clock)"
    numbers: dict[str, Any] = {"bytes_per_second": rate, "datasheet": limit}
    if rate < WORTHWHILE_FRACTION * limit:
        advice = "another process uses this GPU, or its memory runs at a lower clock: nvidia-smi -q -d CLOCK"
        return slow("memory bandwidth", value, advice, **numbers)
    return works("memory bandwidth", value, **numbers)


def theoretical_bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second that a GPU's driver tells of its memory; None if it does not."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    bits, kilohertz = (getattr(properties, name, 0) for name in ("memory_bus_width", "memory_clock_rate"))
    return 2.0 * kilohertz * 1e3 * bits / 8 or None  # two transfers per clock
