"""Text plot of the learning rate over a run."""

from __future__ import annotations

from collections.abc import Sequence

from vit_scale.schedule import LearningRate

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 64, 6


def plot_learning_rate(lr: LearningRate, blocks: str = BLOCKS) -> list[str]:
    """Return the lines of the plot: peak and zero on the left; steps 0, end of warmup and last step below.

    `blocks` are the characters for a cell from empty to full; use " #" for terminals without block characters.
    """
    rates = [lr.at(step) for step in _spread(lr.steps, WIDTH)]
    rows = bars([rate / lr.peak for rate in rates], HEIGHT, blocks)
    labels = [f"{lr.peak:.2e}", *[""] * (HEIGHT - 2), "0"]
    margin = len(labels[0])
    lines = [f"{label:>{margin}} {row}".rstrip() for label, row in zip(labels, rows, strict=True)]
    return [*lines, f"{'':{margin}} {_ticks(lr, len(rates))}"]


def bars(fractions: Sequence[float], height: int, blocks: str) -> list[str]:
    """Draw one bar of up to `height` cells per fraction of 1, as rows from the top."""
    parts = len(blocks) - 1
    filled = [round(fraction * height * parts) for fraction in fractions]
    return [
        "".join(blocks[min(max(count - row * parts, 0), parts)] for count in filled) for row in reversed(range(height))
    ]


def _spread(steps: int, columns: int) -> list[int]:
    """Return evenly spaced steps from the first to the last, at most `columns`."""
    columns = min(columns, steps)
    return [round(column * (steps - 1) / max(1, columns - 1)) for column in range(columns)]


def _ticks(lr: LearningRate, columns: int) -> str:
    """Return the step labels below their columns; the end of warmup only if there is space for it."""
    last = f"{lr.steps:,} steps"
    line = "0".ljust(max(columns - len(last), 2)) + last
    at = round(lr.warmup_steps / lr.steps * columns)
    text = f"{lr.warmup_steps:,}"
    if at >= 2 and at + len(text) + 1 < columns - len(last):
        line = line[:at] + text + line[at + len(text) :]
    return line
