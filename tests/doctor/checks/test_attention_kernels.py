"""An attention kernel that is missing or wrong is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vit_scale.doctor.check import Setup
from vit_scale.doctor.checks import attention_kernels
from vit_scale.errors import UserError
from vit_scale.kernels import cpu, cpu_attention


@pytest.mark.parametrize("name", ["math", "flash"])
def test_kernels_of_this_machine_equal_the_explicit_computation(setup: Setup, name: Any) -> None:
    found = attention_kernels.kernel(setup, name)
    assert found.status == "works"
    assert found.numbers["error"]["float32"] < 1e-5


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_wrong_kernel_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup, wrong: float) -> None:
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **options: wrong * right(*args, **options))
    found = attention_kernels.kernel(setup, "math")
    assert (found.status, found.required) == ("broken", True)
    assert "model.kernel=explicit" in found.advice


def test_kernel_that_does_not_run_is_skipped(setup: Setup) -> None:
    found = attention_kernels.kernel(setup, "cudnn")
    assert (found.status, found.value) == ("skipped", "does not run on this CPU")


def test_gpu_without_flash_attention_is_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("model.kernel = flash: this kernel does not run on cuda. Use auto.")

    monkeypatch.setattr(attention_kernels, "check_attention_kernel", refuse)
    gpu = dataclasses.replace(setup, gpus=1)
    assert attention_kernels.kernel(gpu, "flash").status == "slow"
    assert attention_kernels.kernel(gpu, "cudnn").status == "skipped"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "vectors", lambda: "AVX2")
    monkeypatch.setattr(cpu_attention, "is_built", lambda: True)
    monkeypatch.delenv("VIT_SCALE_KERNELS", raising=False)


@pytest.mark.skipif(not cpu_attention.is_built(), reason="the kernel was not built")
def test_cpu_kernel_equals_the_explicit_computation(setup: Setup) -> None:
    assert attention_kernels.custom_kernel(setup).status == "works"


@pytest.mark.usefixtures("built")
def test_cpu_kernel_that_was_not_built_is_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(cpu_attention, "is_built", lambda: False)
    found = attention_kernels.custom_kernel(setup)
    assert (found.status, found.value) == ("slow", "not built")
    assert "install gcc" in found.advice


@pytest.mark.usefixtures("built")
def test_cpu_kernel_that_is_switched_off_is_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setenv("VIT_SCALE_KERNELS", "0")
    assert attention_kernels.custom_kernel(setup).status == "slow"


@pytest.mark.usefixtures("built")
def test_wrong_cpu_kernel_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(cpu_attention, "attend", lambda qkv, heads: qkv[..., : qkv.shape[-1] // 3] * torch.ones(1))
    found = attention_kernels.custom_kernel(setup)
    assert found.status == "broken"
    assert "VIT_SCALE_KERNELS=0" in found.advice


def test_cpu_kernel_is_skipped_where_it_is_not_used(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    assert attention_kernels.custom_kernel(dataclasses.replace(setup, gpus=1)).status == "skipped"
    monkeypatch.setattr(cpu, "vectors", lambda: "SVE")
    assert attention_kernels.custom_kernel(setup).status == "skipped"
