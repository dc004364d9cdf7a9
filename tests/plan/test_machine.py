"""Devices for planning: GPU types by name, and this system."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vit_scale.cost.hardware import GPUS
from vit_scale.errors import UserError
from vit_scale.plan.machine import find_machine
from vit_scale.plan.run_cost import ASSUMED_MFU, assumed_mfu


@pytest.mark.parametrize("name", ["H100", "h100", "A100 40GB", "a100-40gb", "rtx4090", "H100_PCIe"])
def test_gpu_is_found_in_any_spelling(name: str) -> None:
    machine = find_machine(2, name)
    assert machine.kind in GPUS
    assert machine.peak_flops == GPUS[machine.kind].tflops * 1e12


def test_unknown_gpu_error_lists_the_available_ones() -> None:
    with pytest.raises(UserError, match=r"did you mean 'H100'\? available: H100 PCIe, H100, .*RTX 3090"):
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


@pytest.mark.parametrize(("kind", "half", "ratio"), [("A100", "bf16", 1 / 2), ("V100", "fp16", 1 / 8)])
def test_fp32_has_a_lower_peak(kind: str, half: str, ratio: float) -> None:
    machine = find_machine(1, kind)
    assert machine.precision("auto") == half
    assert machine.peak_at("fp32") == ratio * machine.peak_at(half)


def test_longer_names_come_before_the_names_they_contain() -> None:
    names = list(GPUS)
    for i, name in enumerate(names):
        assert not any(name in later for later in names[i + 1 :])


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
