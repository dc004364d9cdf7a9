"""A precision that is wrong, slow or ends the process, and a compiler that fails, are found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from vit_scale.doctor.check import Setup
from vit_scale.doctor.checks import precision
from vit_scale.models.vit import VisionTransformer
from vit_scale.strategies import precision as resolving


@pytest.fixture
def setup(setup: Setup) -> Setup:
    """Without --quick."""
    return dataclasses.replace(setup, quick=False)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> Setup:
    """A machine with a compiler."""
    monkeypatch.setattr(precision.shutil, "which", lambda name: f"/usr/bin/{name}")
    return setup


def test_fp32_works(setup: Setup) -> None:
    found = precision.precision(setup, "fp32")
    assert found.status == "works"
    assert found.numbers["error"] < precision.TOLERANCES["fp32"]


@pytest.mark.parametrize("error", [0.1, float("nan")])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_wrong_matmul_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup, name: str, error: float) -> None:
    monkeypatch.setattr(resolving, "_cpu_supports_bf16", lambda: True)
    monkeypatch.setattr(precision, "matmul_error", lambda name, device: error)
    found = precision.precision(setup, name)
    assert (found.status, found.advice) == ("broken", f"do not train in {name}")


def test_bf16_that_crashes_is_broken_but_training_does_not_rely_on_it(
    monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    monkeypatch.setattr(resolving, "_cpu_supports_bf16", lambda: False)
    found = precision.precision(setup, "bf16")
    assert (found.status, found.required) == ("broken", False)
    assert "crashes on this CPU" in found.value
    assert "ONEDNN_MAX_CPU_ISA" in found.advice


def test_half_precision_slower_than_fp32_is_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(resolving, "_cpu_supports_bf16", lambda: True)
    monkeypatch.setattr(precision, "matmul_error", lambda name, device: 1e-3)
    monkeypatch.setattr(precision, "matmul_speed", lambda name, *_: {"fp32": 2.0, "bf16": 1.0}[name])
    found = precision.precision(setup, "bf16")
    assert (found.status, found.numbers["speedup"]) == ("slow", 0.5)


def test_precisions_that_the_device_does_not_have_are_skipped(setup: Setup) -> None:
    assert precision.precision(setup, "tf32").status == "skipped"
    found = precision.precision(setup, "fp16")
    assert (found.status, found.value) == ("skipped", "not supported on a CPU")


def test_quick_checks_fp32_only(setup: Setup) -> None:
    quick = dataclasses.replace(setup, quick=True)
    assert precision.precision(quick, "fp32").status == "works"
    assert precision.precision(quick, "bf16").value == "--quick"
    assert precision.compiled(quick).value == "--quick"


def test_missing_compiler_is_broken(monkeypatch: pytest.MonkeyPatch, full: Setup) -> None:
    monkeypatch.setattr(precision.shutil, "which", lambda name: None)
    found = precision.compiled(full)
    assert (found.status, found.required) == ("broken", False)


def test_compiler_that_fails_is_broken(monkeypatch: pytest.MonkeyPatch, full: Setup) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("CppCompileError: C++ compile error")

    monkeypatch.setattr(VisionTransformer, "compile_blocks", lambda self: setattr(self, "forward", fails))
    found = precision.compiled(full)
    assert (found.status, found.required) == ("broken", False)
    assert "C++ compile error" in found.value


def test_compiled_blocks_that_are_wrong_are_broken(monkeypatch: pytest.MonkeyPatch, full: Setup) -> None:
    def miscompile(model: Any) -> None:
        with torch.no_grad():
            model.head.weight.mul_(1.01)

    monkeypatch.setattr(VisionTransformer, "compile_blocks", miscompile)
    found = precision.compiled(full)
    assert (found.status, found.required) == ("broken", True)


def test_compiled_blocks_that_are_right_work(monkeypatch: pytest.MonkeyPatch, full: Setup) -> None:
    monkeypatch.setattr(VisionTransformer, "compile_blocks", lambda self: None)
    assert precision.compiled(full).status == "works"
