"""Reading metrics.jsonl in any state, and downsampling long curves."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from vit_scale.page.metrics import MAX_POINTS, downsample, read_metrics


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_missing_file_gives_no_curves(tmp_path: Path) -> None:
    metrics = read_metrics(tmp_path / "metrics.jsonl", 32)
    assert metrics.curves == {}
    assert metrics.last_step == 0


def test_partial_and_invalid_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    lines = ['{"step": 1, "train/loss": 2}', "[3]", '{"train/loss": 1}', '{"step": "x"}', '{"step": 2, "train/lo']
    metrics = read_metrics(write(tmp_path, *lines), 32)
    assert metrics.curves == {"train/loss": {1: 2}}
    assert metrics.unreadable_lines == 4


@pytest.mark.parametrize("written", ["null", "NaN", "Infinity"])
def test_non_finite_values_are_gaps(tmp_path: Path, written: str) -> None:
    path = write(tmp_path, '{"step": 1, "train/loss": 2}', f'{{"step": 2, "train/loss": {written}}}')
    assert read_metrics(path, 32).curves["train/loss"] == {1: 2, 2: None}


def test_strings_and_booleans_are_not_curves(tmp_path: Path) -> None:
    assert read_metrics(write(tmp_path, '{"step": 1, "note": "hi", "flag": true, "a": 1}'), 32).curves == {"a": {1: 1}}


def test_step_logged_twice_has_its_later_value_and_steps_ascend(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "train/loss": i}) for i, step in enumerate([10, 20, 30, 20, 30])]
    assert read_metrics(write(tmp_path, *lines), 32).curves["train/loss"] == {10: 0, 20: 3, 30: 4}


def test_training_time_is_derived_from_images_and_speed(tmp_path: Path) -> None:
    lines = [
        '{"step": 10, "speed/images_per_second": 32}',
        '{"step": 10, "val/top1": 0.5}',
        '{"step": 20, "speed/images_per_second": 64}',
    ]
    metrics = read_metrics(write(tmp_path, *lines), 32)
    assert metrics.images == {10: 320, 20: 640}
    assert metrics.seconds == {10: 10.0, 20: 15.0}


def test_logged_images_take_precedence_over_steps_times_batch_size(tmp_path: Path) -> None:
    metrics = read_metrics(write(tmp_path, '{"step": 10, "images": 7, "a": 1}'), 32)
    assert metrics.images == {10: 7}
    assert "images" not in metrics.curves


def test_short_curves_are_not_downsampled() -> None:
    assert downsample([1.0] * MAX_POINTS) == list(range(MAX_POINTS))


def test_downsampling_preserves_ends_extremes_and_gaps() -> None:
    draw = random.Random(0)
    values: list[float | None] = [math.sin(i / 900) + draw.gauss(0, 0.1) for i in range(50_000)]
    values[20_001], values[31_234], values[44_444] = 9.0, -9.0, None
    kept = downsample(values)
    assert len(kept) <= MAX_POINTS + 3
    assert kept == sorted(set(kept))
    assert {0, 20_001, 31_234, 44_444, 49_999} <= set(kept)


def test_downsampling_preserves_the_envelope() -> None:
    """The minimum and maximum of every interval of a pixel's width are preserved."""
    draw = random.Random(1)
    values: list[float | None] = [draw.random() for _ in range(40_000)]
    kept = set(downsample(values))
    for start in range(0, 40_000, 400):  # ten intervals of 40 values
        there = [values[i] for i in range(start, start + 400)]
        shown = [values[i] for i in range(start, start + 400) if i in kept]
        assert (min(shown), max(shown)) == (min(there), max(there))


def test_curve_of_gaps_is_downsampled() -> None:
    assert len(downsample([None] * 10_000)) <= MAX_POINTS
