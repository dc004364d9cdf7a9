"""Text plot of the learning rate."""

from __future__ import annotations

import pytest

from vit_scale.plan.lr_plot import HEIGHT, WIDTH, bars, plot_learning_rate
from vit_scale.schedule import LearningRate


def heights(lines: list[str], margin: int) -> list[int]:
    """Return the number of full cells per column."""
    rows = [line[margin:].ljust(WIDTH) for line in lines[:HEIGHT]]
    return [sum(row[column] == "█" for row in rows) for column in range(WIDTH)]


def test_bars_fill_from_the_bottom_in_parts_of_a_cell() -> None:
    assert bars([0, 0.25, 0.5, 0.75, 1], 2, " ▄█") == ["   ▄█", " ▄███"]


def test_plot_rises_during_warmup_and_falls_afterwards() -> None:
    lines = plot_learning_rate(LearningRate(1e-3, 0.0, steps=10_000, warmup_steps=2_500))
    columns = heights(lines, len("1.00e-03 "))
    top = columns.index(max(columns))
    assert columns[: top + 1] == sorted(columns[: top + 1])
    assert columns[top:] == sorted(columns[top:], reverse=True)
    assert top == pytest.approx(WIDTH / 4, abs=2)
    assert lines[0].startswith("1.00e-03")
    assert lines[-1].split() == ["0", "2,500", "10,000", "steps"]


def test_warmup_label_is_omitted_if_it_does_not_fit() -> None:
    lines = plot_learning_rate(LearningRate(1e-3, 0.0, steps=10_000, warmup_steps=10))
    assert lines[-1].split() == ["0", "10,000", "steps"]


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_short_runs_have_one_column_per_step(steps: int) -> None:
    lines = plot_learning_rate(LearningRate(1.0, 1.0, steps=steps, warmup_steps=0, shape="constant"))
    assert lines[0].split() == ["1.00e+00", "█" * steps]


def test_ascii_characters_are_supported() -> None:
    lines = plot_learning_rate(LearningRate(1e-3, 0.0, steps=100, warmup_steps=10), blocks=" #")
    assert all(line.isascii() for line in lines)
