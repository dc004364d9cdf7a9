"""Precisions: whether a matmul is right and faster than in fp32, and whether blocks compile."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from vit_scale.doctor.check import Check, Setup, broken, largest, skipped, slow, works
from vit_scale.errors import UserError, first_line
from vit_scale.models.create import create_model
from vit_scale.strategies.precision import resolve_precision

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"fp32": 1e-5, "tf32": 3e-3, "bf16": 2e-2, "fp16": 3e-3}
"""Largest error of a matmul relative to its largest value."""
COMPILED_TOLERANCE = 1e-3
REPEATS = 5
T = TypeVar("T")


def precision(setup: Setup, name: str) -> Check:
    """Compare a matmul with float64, and its time with fp32."""
    device = torch.device(setup.device)
    if name == "tf32" and not has_tf32(device):
        return skipped(name, "only on GPUs since NVIDIA Ampere")
    if name != "fp32" and setup.quick:
        return skipped(name, "--quick")
    try:
        if name in ("bf16", "fp16"):
            resolve_precision(name, device)  # type: ignore[arg-type]
    except UserError as error:
        message, _, advice = str(error).partition("\n")
        if setup.gpus or "crashes" not in message:
            return skipped(name, message.partition(": ")[2].split(";")[0])
        return broken(name, message.partition(": ")[2], advice, required=False)
    found = matmul_error(name, device)
    if not found < TOLERANCES[name]:
        return broken(name, f"a matmul is wrong by {found:.0e}", f"do not train in {name}", error=found)
    size = (512 if setup.quick else 1024) if device.type == "cpu" else 8192
    speed = matmul_speed(name, device, size) / matmul_speed("fp32", device, size)
    value = f"matmul error {found:.0e}"
    if name == "fp32":
        return works(name, value, error=found)
    value += f", {speed:.1f}x the speed of fp32"
    if speed < 1:
        return slow(name, value, "use parallel.precision=fp32", error=found, speedup=speed)
    return works(name, value, error=found, speedup=speed)


def has_tf32(device: torch.device) -> bool:
    """Return whether the device computes in TF32."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def matmul_error(name: str, device: torch.device) -> float:
    """Return the largest error of a matmul relative to its largest value."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator).to(device, DTYPES[name]) for _ in range(2))
    exact = a.double() @ b.double()
    return ((_in_precision(name, lambda: a @ b).double() - exact).abs().max() / exact.abs().max()).item()


def matmul_speed(name: str, device: torch.device, size: int) -> float:
    """Return FLOP/s of the fastest of a few matmuls."""
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[name]) for _ in range(2))
    return 2.0 * size**3 / _in_precision(name, lambda: fastest(lambda: a @ b, device, REPEATS))


def fastest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the seconds of the fastest call, after one that is not counted."""
    best = float("inf")
    for i in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        if i:
            best = min(best, time.perf_counter() - start)
    return best


def compiled(setup: Setup) -> Check:
    """Compile the blocks of a small model, and compare it with eager mode."""
    if setup.quick:
        return skipped("compile", "--quick")
    if not setup.gpus and not (shutil.which("g++") or shutil.which("clang++")):
        return broken("compile", "no C++ compiler", "install g++ to use parallel.compile", required=False)
    outputs = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = create_model("vit_mu", num_classes=10, depth=1).to(setup.device)
        if compiles:
            setup.stage("compiling")
            model.compile_blocks()  # type: ignore[operator]
        images = torch.randn(4, 3, *model.img_size, generator=torch.Generator().manual_seed(1)).to(setup.device)  # type: ignore[misc]
        try:
            loss = model(images).square().sum()
            loss.backward()
        except Exception as error:  # noqa: BLE001 -- compilers raise anything
            return broken("compile", f"fails: {first_line(error)}", "do not set parallel.compile", required=False)
        outputs.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    found = largest(_relative_error(a, b) for a, b in zip(*outputs, strict=True))
    if not found < COMPILED_TOLERANCE:
        return broken(
            "compile", f"compiled blocks are wrong by {found:.0e}", "do not set parallel.compile", error=found
        )
    return works("compile", f"compiled blocks equal eager mode, error {found:.0e}", error=found)


def _relative_error(found: Tensor, right: Tensor) -> float:
    return ((found - right).abs().max() / right.abs().max().clamp_min(1e-6)).item()


def _in_precision(name: str, work: Callable[[], T]) -> T:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        return work()
    finally:
        torch.set_float32_matmul_precision(before)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
