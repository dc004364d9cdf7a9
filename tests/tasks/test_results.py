"""Metrics and tables: direction, formatting, and no torch."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from vit_scale.tasks.results import Metric, Table

ACCURACY = Metric("top1", "top-1", title="Top-1 accuracy")
ERROR = Metric("rmse", "RMSE", higher=False, percent=False)


@pytest.mark.parametrize(
    ("metric", "value", "best", "better"),
    [
        (ACCURACY, 0.6, 0.5, True),
        (ACCURACY, 0.5, 0.5, False),
        (ACCURACY, 0.4, 0.5, False),
        (ERROR, 0.4, 0.5, True),
        (ERROR, 0.5, 0.5, False),
        (ERROR, 0.6, 0.5, False),
        (ACCURACY, 0.0, None, True),
        (ERROR, math.nan, None, False),
        (ACCURACY, math.nan, 0.5, False),
        (ERROR, math.nan, 0.5, False),
    ],
)
def test_better_follows_the_direction_and_nan_is_never_better(
    metric: Metric, value: float, best: float | None, better: bool
) -> None:
    assert metric.is_better(value, best) is better


def test_best_of_follows_the_direction() -> None:
    assert ACCURACY.best_of([0.1, 0.7, 0.3]) == 0.7
    assert ERROR.best_of([0.1, 0.7, 0.3]) == 0.1


def test_fractions_are_percentages_and_other_values_have_four_decimals() -> None:
    assert ACCURACY.text(0.98611) == "98.61%"
    assert ERROR.text(0.98611) == "0.9861"


def test_heading_is_the_title_or_the_label() -> None:
    assert (ACCURACY.heading, ERROR.heading) == ("Top-1 accuracy", "RMSE")


def test_table_cells_are_formatted_by_column() -> None:
    table = Table("t", "T", ["class_name", "images", "recall", "error"], [], percent=["recall"])
    assert table.headings() == ["class name", "images", "recall", "error"]
    assert table.texts(["cat", 1234, 0.5, 0.123456]) == ["cat", "1,234", "50.0%", "0.1235"]
    assert table.texts([None, 0, 1.0, 12.0]) == ["", "0", "100.0%", "12"]


def test_row_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Table("t", "T", ["a", "b"], []).texts([1])


def test_results_import_no_torch() -> None:
    code = "import sys, vit_scale.tasks.results; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
