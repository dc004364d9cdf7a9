"""Devices for planning: GPU types by name, and this system."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vit_scale.cost.hardware import GPUS
from vit_scale.errors import UserError
from vit_scale.plan.machine import Machine, find_machine
from vit_scale.plan.run_cost import ASSUMED_MFU, assumed_mfu


@pytest.mark.parametrize(
    "name", ["H100", "h100", "A100 40GB", "a100-40gb", "rtx4090", "H100_PCIe", "RTX A6000", "NVIDIA A100-SXM4-80GB"]
)
def test_gpu_is_found_in_any_spelling(name: str) -> None:
    machine = find_machine(2, name)
    assert machine.kind in GPUS
    assert machine.peak_flops == GPUS[machine.kind].tflops * 1e12


def test_unknown_gpu_error_lists_the_available_ones() -> None:
    with pytest.raises(UserError, match=r"did you mean 'H100'\? available: H100, H100 PCIe, .*RTX 3090"):
        find_machine(8, "H1000")


@pytest.mark.parametrize("gpus", [0, -1])
def test_fewer_than_one_gpu_is_rejected(gpus: int) -> None:
    with pytest.raises(UserError, match="at least 1"):
        find_machine(gpus, "H100")


@pytest.mark.skipif(torch.cuda.is_available(), reason="plans for the GPU of this system")
def test_gpu_type_is_assumed_and_reported_if_missing() -> None:
    machine = find_machine(8)
    assert (machine.kind, machine.devices) == ("H100", 8)
    assert "assumed" in machine.source
    assert find_machine().device == "cpu"


@pytest.mark.parametrize(
    ("kind", "half", "tf32", "fp32"),
    [("A100", "bf16", 156, 19.5), ("V100", "fp16", 15.7, 15.7), ("MI300X", "bf16", 163, 163)],
)
def test_fp32_has_the_peak_of_its_arithmetic(kind: str, half: str, tf32: float, fp32: float) -> None:
    machine = find_machine(1, kind)
    assert machine.precision("auto") == half
    assert machine.peak_at("fp32") == tf32 * 1e12
    assert machine.peak_at("fp32", tf32=False) == fp32 * 1e12


@pytest.mark.parametrize(
    ("half", "tf32", "expected"), [("bf16", True, 50), ("bf16", False, 12.5), ("fp16", True, 12.5)]
)
def test_fp32_peak_of_other_gpus_is_a_fraction_of_half_precision(half: str, tf32: bool, expected: float) -> None:
    assert Machine("X1", 1, 10**9, 100.0, "cuda", half).peak_at("fp32", tf32=tf32) == expected  # type: ignore[arg-type]


def test_mfu_is_assumed_higher_for_larger_models_and_lower_for_faster_gpus() -> None:
    for row in ASSUMED_MFU.values():
        assert sorted(row.values()) == list(row.values())
    large = [
        assumed_mfu(find_machine(1, kind), 304_000_000, 61_000_000_000)[0] for kind in ("RTX 3090", "A100", "H100")
    ]
    assert sorted(large, reverse=True) == large


def test_docs_have_the_assumed_mfu(root: Path) -> None:
    text = (root / "docs" / "scaling.md").read_text()
    for row in ASSUMED_MFU.values():
        assert " | ".join(f"{mfu:.2f}" for mfu in row.values()) in text


@pytest.mark.parametrize(
    ("params", "macs", "size"),
    [
        (19e6, 0.3e9, "tiny"),
        (22e6, 4.6e9, "small"),
        (22e6, 15.5e9, "small"),
        (86e6, 17.6e9, "base"),
        (632e6, 167e9, "large"),
    ],
)
def test_model_size_is_the_smaller_by_parameters_and_macs(params: float, macs: float, size: str) -> None:
    assert f"a {size} model" in assumed_mfu(find_machine(1, "H100"), int(params), int(macs))[1]
