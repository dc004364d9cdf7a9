"""What the benchmarks say of two sides, and the page that is made of it."""

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
def side_by_side(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "benchmarks")
    return importlib.import_module("side_by_side")


@pytest.fixture
def run_all(side_by_side: ModuleType) -> ModuleType:
    return importlib.import_module("run_all")


@pytest.mark.parametrize(
    ("better", "goal", "ratio", "reached"),
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
def test_goals(side_by_side: ModuleType, better: str, goal: float | None, ratio: float, reached: bool | None) -> None:
    row = side_by_side.Row("case", ratio, 1.0, "s", ratio, ratio, ratio, goal=goal, better=better)
    assert row.reached is reached
    assert ("not reached" in row.goal_in_words()) == (reached is False)


def test_sides_take_turns_and_change_their_order(side_by_side: ModuleType) -> None:
    calls: list[str] = []

    def side(name: str, value: float) -> float:
        calls.append(name)
        return value

    values = side_by_side.interleave({"a": lambda: side("a", 4.0), "b": lambda: side("b", 2.0)}, rounds=2, warmup=1)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    row = side_by_side.compare("case", values, "a", "b", "images/s")
    assert (row.ours, row.peer, row.ratio) == (4.0, 2.0, 2.0)


def test_the_page_has_every_row_with_spread_goal_and_limit(run_all: ModuleType, side_by_side: ModuleType) -> None:
    row = side_by_side.Row("a case", 20.0, 10.0, "images/s", 2.0, 1.9, 2.1, goal=1.5, limit="the sun")
    row.more["more figures"] = 0.5
    found = dataclasses.asdict(row) | {"reached": True}
    report = {"machine": "a machine", "rows": [found], "notes": ["a note"], "seconds": 60.0}
    page = run_all.page({"train_step": report}, argparse.Namespace(data="x/photos", small=None), minutes=12.0)
    assert "| a case | 20 | 10 | images/s | 2.00 | 1.90 to 2.10 | >= 1.5: reached |" in page
    for words in ("a machine", "12 minutes", "photographs photos", "the sun", "0.5 more figures", "a note"):
        assert words in page


def test_the_share_of_the_peak_stands_beside_its_throughput(side_by_side: ModuleType) -> None:
    row = side_by_side.Row("case", 20.0, 10.0, "images/s", 2.0, 2.0, 2.0)
    assert side_by_side.sides_in_words(row) == ("20", "10")
    layer = vit_scale.create_model("vit_mu")
    peak = 20 * 6 * count_model(layer).macs / 1e9 * 4
    assert side_by_side.sides_in_words(side_by_side.with_shares_of_peak(row, layer, peak)) == ("20 (25 %)", "10 (12 %)")


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ([2.0, 1.6], ["**All 2 goals reached.**"]),
        ([2.0, 1.4], ["**1 of 2 goals reached.**", "", "- case: 1.40, >= 1.5: not reached"]),
    ],
)
def test_the_page_begins_with_the_goals(
    run_all: ModuleType, side_by_side: ModuleType, ratios: list[float], says: list[str]
) -> None:
    rows = [side_by_side.Row("case", r, 1.0, "s", r, r, r, goal=1.5) for r in ratios]
    rows.append(side_by_side.Row("without a goal", 1.0, 1.0, "s", 1.0, 1.0, 1.0))
    found = [dataclasses.asdict(row) | {"reached": row.reached} for row in rows]
    assert run_all.goals({"train_step": {"rows": found}}) == says


def test_every_benchmark_is_on_the_page_but_the_one_that_takes_an_hour(run_all: ModuleType, root: Path) -> None:
    scripts = {
        path.stem for path in (root / "benchmarks").glob("*.py") if "from side_by_side import" in path.read_text()
    }
    rows = {name for name in scripts if "show(" in (root / f"benchmarks/{name}.py").read_text()}
    assert set(run_all.ABOUT) == rows


def test_on_a_cpu_programs_that_are_started_see_no_gpu(
    side_by_side: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    options = side_by_side.parser("", rounds=1)
    assert options.parse_args([]).device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert options.parse_args(["--device", "cpu"]).device == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(SystemExit):
        options.parse_args(["--device", "tpu"])
