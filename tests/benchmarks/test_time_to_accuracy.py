"""Parts of the time-to-accuracy benchmark that can be tested in less than an hour."""

from __future__ import annotations

import importlib
import json
import re
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image


@pytest.fixture
def time_to_accuracy(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "benchmarks")
    return importlib.import_module("time_to_accuracy")


def test_lines_are_read_as_they_are_written(time_to_accuracy: ModuleType, tmp_path: Path) -> None:
    path, lines, ended = tmp_path / "metrics.jsonl", [], threading.Event()
    reader = threading.Thread(target=time_to_accuracy.read_as_written, args=(path, lines, ended))
    reader.start()
    path.write_text('{"step": 1}\n')
    time.sleep(1.2)
    with path.open("a") as file:
        file.write('{"step": 2}\n')
    ended.set()
    reader.join()
    assert [line["step"] for line in lines] == [1, 2]
    assert 0 < lines[0]["seconds"] < lines[1]["seconds"] < 10


def test_shorter_run_keeps_the_warmup_fraction(time_to_accuracy: ModuleType) -> None:
    options = dict(option.split("=") for option in time_to_accuracy.length(1000))
    assert options["schedule.steps"] == "1000"
    assert 0 < int(options["schedule.warmup_steps"]) <= 100
    assert options["schedule.epochs"] == options["schedule.warmup_epochs"] == "null"


def test_curves_are_drawn_from_the_results_file(time_to_accuracy: ModuleType, tmp_path: Path, root: Path) -> None:
    curves = json.loads((root / "docs/results.json").read_text())
    time_to_accuracy.draw(curves, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width > 500


def test_readme_quotes_the_measured_result(root: Path) -> None:
    curves = json.loads((root / "docs/results.json").read_text())
    readme, results = (root / "README.md").read_text(), (root / "docs/results.md").read_text()
    for side in ("ours", "timm"):
        top1 = f"{100 * curves[side]['evaluations'][-1]['top1']:.1f}"
        assert re.search(rf"\b{re.escape(top1)} ?%", readme)
        assert f"{top1}%" in results
        assert curves[side]["minutes"] <= 25.5
