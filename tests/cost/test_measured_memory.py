"""The memory model predicts the bytes that torch's allocator allocates in training steps on CPU."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.processes import run_script
from vit_scale.plan.fits import memory_model
from vit_scale.plan.machine import Machine
from vit_scale.recipe import build_config
from vit_scale.report.model_report import report_on

WORKER = "tests/workers/peak_memory.py"
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "many tokens": (8, {"name": "vit_cifar_small", "depth": 6}),
    "wide": (4, {"name": "vit_cifar_512x6", "depth": 3}),
    "large images": (2, {"name": "vit_tiny_patch16_224", "depth": 4}),
    "drop path": (16, {"name": "vit_cifar_small", "depth": 4, "drop_path": 0.3, "layer_scale": 1e-4}),
    "window": (4, {"name": "vit_cifar_small", "depth": 4, "img_size": 64, "attention": "window", "window": 4}),
    "linear": (4, {"name": "vit_cifar_small", "depth": 4, "img_size": 64, "attention": "linear"}),
    "timm": (8, {"name": "timm/vit_tiny_patch16_224", "img_size": 64}),
}
KINDS = ("window", "linear")
ONE_PROCESS = list(itertools.product([kind for kind in MODELS if kind not in KINDS], (1, 2), ("none", "full")))
ONE_PROCESS += [(kind, 1, "none") for kind in KINDS]
DDP = list(itertools.product(("many tokens", "wide"), (1, 2), ("none", "full")))


def measured(processes: int, cases: list[tuple[str, int, str]]) -> dict[Any, int]:
    requests = [
        {"model": MODELS[kind][1], "batch": MODELS[kind][0], "accumulation": accumulation, "checkpointing": mode}
        for kind, accumulation, mode in cases
    ]
    done = run_script(WORKER, json.dumps(requests), processes=processes)
    assert done.returncode == 0, done.stderr
    peaks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(zip(cases, map(min, zip(*peaks, strict=True)), strict=True))


@pytest.fixture(scope="module")
def one_process() -> dict[Any, int]:
    return measured(1, ONE_PROCESS)


@pytest.fixture(scope="module")
def two_processes() -> dict[Any, int]:
    return measured(2, DDP)


def predicted(kind: str, accumulation: int, checkpointing: str, processes: int) -> int:
    batch, options = MODELS[kind]
    parallel = {"precision": "fp32", "activation_checkpointing": checkpointing}
    config = build_config({"model": options, "schedule": {"steps": 1}, "parallel": parallel})
    report = report_on(config, gpus=processes, on_cpu=True)
    machine = Machine("CPU", processes, 2**40, None, "cpu", "fp32")
    return memory_model(report, machine, config).footprint("ddp", batch, accumulation).peak


@pytest.mark.parametrize("case", ONE_PROCESS, ids=str)
def test_single_process_peak_is_predicted_within_10_percent(case: tuple[str, int, str], one_process: dict) -> None:
    assert predicted(*case, processes=1) == pytest.approx(one_process[case], rel=0.1)


@pytest.mark.parametrize("case", DDP, ids=str)
def test_ddp_peak_is_predicted_within_15_percent(case: tuple[str, int, str], two_processes: dict) -> None:
    assert predicted(*case, processes=2) == pytest.approx(two_processes[case], rel=0.15)
