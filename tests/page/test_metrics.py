"""Reading metrics.jsonl, whatever state it is in, and thinning out long curves."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from vit_scale.page.metrics import MOST_POINTS, read_metrics, thin


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_missing_file_is_a_run_without_curves(tmp_path: Path) -> None:
    metrics = read_metrics(tmp_path / "metrics.jsonl", 32)
    assert metrics.curves == {}
    assert metrics.last_step == 0


def test_half_a_line_and_other_rubbish_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = ['{"step": 1, "train/loss": 2}', "[3]", '{"train/loss": 1}', '{"step": "x"}', '{"step": 2, "train/lo']
    metrics = read_metrics(write(tmp_path, *lines), 32)
    assert metrics.curves == {"train/loss": {1: 2}}
    assert metrics.unreadable_lines == 4


@pytest.mark.parametrize("written", ["null", "NaN", "Infinity"])
def test_what_is_not_finite_is_a_gap(tmp_path: Path, written: str) -> None:
    path = write(tmp_path, '{"step": 1, "train/loss": 2}', f'{{"step": 2, "train/loss": {written}}}')
    assert read_metrics(path, 32).curves["train/loss"] == {1: 2, 2: None}


def test_text_and_truth_values_are_no_curves(tmp_path: Path) -> None:
    assert read_metrics(write(tmp_path, '{"step": 1, "note": "hi", "flag": true, "a": 1}'), 32).curves == {"a": {1: 1}}


def test_a_step_logged_twice_has_its_later_value_and_steps_rise(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "train/loss": i}) for i, step in enumerate([10, 20, 30, 20, 30])]
    assert read_metrics(write(tmp_path, *lines), 32).curves["train/loss"] == {10: 0, 20: 3, 30: 4}


def test_training_time_adds_up_from_images_and_speed(tmp_path: Path) -> None:
    lines = [
        '{"step": 10, "speed/images_per_second": 32}',
        '{"step": 10, "val/top1": 0.5}',
        '{"step": 20, "speed/images_per_second": 64}',
    ]
    metrics = read_metrics(write(tmp_path, *lines), 32)
    assert metrics.images == {10: 320, 20: 640}
    assert metrics.seconds == {10: 10.0, 20: 15.0}


def test_logged_images_are_preferred_to_counted_ones(tmp_path: Path) -> None:
    metrics = read_metrics(write(tmp_path, '{"step": 10, "images": 7, "a": 1}'), 32)
    assert metrics.images == {10: 7}
    assert "images" not in metrics.curves


def test_short_curves_are_not_thinned() -> None:
    assert thin([1.0] * MOST_POINTS) == list(range(MOST_POINTS))


def test_thinning_keeps_ends_extremes_and_gaps() -> None:
    draw = random.Random(0)
    values: list[float | None] = [math.sin(i / 900) + draw.gauss(0, 0.1) for i in range(50_000)]
    values[20_001], values[31_234], values[44_444] = 9.0, -9.0, None
    kept = thin(values)
    assert len(kept) <= MOST_POINTS + 3
    assert kept == sorted(set(kept))
    assert {0, 20_001, 31_234, 44_444, 49_999} <= set(kept)


def test_thinning_draws_the_same_envelope() -> None:
    """Of every stretch as wide as a pixel the lowest and highest value stay."""
    draw = random.Random(1)
    values: list[float | None] = [draw.random() for _ in range(40_000)]
    kept = set(thin(values))
    for start in range(0, 40_000, 400):  # ten stretches of 40 values
        there = [values[i] for i in range(start, start + 400)]
        shown = [values[i] for i in range(start, start + 400) if i in kept]
        assert (min(shown), max(shown)) == (min(there), max(there))


def test_a_curve_without_a_number_is_thinned_too() -> None:
    assert len(thin([None] * 10_000)) <= MOST_POINTS
