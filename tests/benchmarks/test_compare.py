"""Comparison of two sides in the benchmarks, and the generated page."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

import vit_scale
from vit_scale.cost.count import count_model


@pytest.fixture
def compare(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "benchmarks")
    return importlib.import_module("compare")


@pytest.fixture
def run_all(compare: ModuleType) -> ModuleType:
    return importlib.import_module("run_all")


@pytest.mark.parametrize(
    ("better", "target", "ratio", "met"),
    [
        ("higher", 2.0, 2.0, True),
        ("higher", 2.0, 1.99, False),
        ("lower", 0.2, 0.2, True),
        ("lower", 0.2, 0.21, False),
        ("near", 0.1, 0.91, True),
        ("near", 0.1, 1.2, False),
        ("higher", None, 1.0, None),
    ],
)
def test_targets(compare: ModuleType, better: str, target: float | None, ratio: float, met: bool | None) -> None:
    row = compare.Row("case", ratio, 1.0, "s", ratio, ratio, ratio, target=target, better=better)
    assert row.met is met
    assert ("not met" in row.format_target()) == (met is False)


def test_sides_alternate_in_changing_order(compare: ModuleType) -> None:
    calls: list[str] = []

    def side(name: str, value: float) -> float:
        calls.append(name)
        return value

    values = compare.interleave({"a": lambda: side("a", 4.0), "b": lambda: side("b", 2.0)}, rounds=2, warmup=1)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    row = compare.compare("case", values, "a", "b", "images/s")
    assert (row.ours, row.baseline, row.ratio) == (4.0, 2.0, 2.0)


def test_page_has_every_row_with_quartiles_target_and_limit(run_all: ModuleType, compare: ModuleType) -> None:
    row = compare.Row("a case", 20.0, 10.0, "images/s", 2.0, 1.9, 2.1, target=1.5, limit="memory bandwidth")
    row.more["more numbers"] = 0.5
    found = dataclasses.asdict(row) | {"met": True}
    report = {"machine": "a system", "rows": [found], "notes": ["a note"], "seconds": 60.0}
    page = run_all.page({"train_step": report}, argparse.Namespace(data="x/photos", small=None), minutes=12.0)
    assert "| a case | 20 | 10 | images/s | 2.00 | 1.90 to 2.10 | >= 1.5: met |" in page
    for text in ("a system", "12 minutes", "photographs photos", "memory bandwidth", "0.5 more numbers", "a note"):
        assert text in page


def test_mfu_is_printed_after_the_throughput(compare: ModuleType) -> None:
    row = compare.Row("case", 20.0, 10.0, "images/s", 2.0, 2.0, 2.0)
    assert compare.format_sides(row) == ("20", "10")
    layer = vit_scale.create_model("vit_mu")
    peak = 20 * 6 * count_model(layer).macs / 1e9 * 4
    assert compare.format_sides(compare.with_mfu(row, layer, peak)) == ("20 (25%)", "10 (12%)")


@pytest.mark.parametrize(
    ("ratios", "lines"),
    [
        ([2.0, 1.6], ["**All 2 targets met.**"]),
        ([2.0, 1.4], ["**1 of 2 targets met.**", "", "- case: 1.40, >= 1.5: not met"]),
    ],
)
def test_page_starts_with_the_targets(
    run_all: ModuleType, compare: ModuleType, ratios: list[float], lines: list[str]
) -> None:
    rows = [compare.Row("case", r, 1.0, "s", r, r, r, target=1.5) for r in ratios]
    rows.append(compare.Row("without a target", 1.0, 1.0, "s", 1.0, 1.0, 1.0))
    found = [dataclasses.asdict(row) | {"met": row.met} for row in rows]
    assert run_all.targets({"train_step": {"rows": found}}) == lines


def test_page_includes_every_benchmark_except_time_to_accuracy(run_all: ModuleType, root: Path) -> None:
    scripts = {path.stem for path in (root / "benchmarks").glob("*.py") if "from compare import" in path.read_text()}
    rows = {name for name in scripts if "show(" in (root / f"benchmarks/{name}.py").read_text()}
    assert set(run_all.ABOUT) == rows


def test_device_cpu_hides_gpus_from_started_programs(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    options = compare.parser("", rounds=1)
    assert options.parse_args([]).device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert options.parse_args(["--device", "cpu"]).device == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(SystemExit):
        options.parse_args(["--device", "tpu"])
