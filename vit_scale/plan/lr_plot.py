"""The learning rate over a run, as a few lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from vit_scale.schedule import LearningRate

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 64, 6


def plot_learning_rate(lr: LearningRate, blocks: str = BLOCKS) -> list[str]:
    """Lines with the peak and zero at the left, and steps below: 0, the end of warm-up, the last.

    `blocks` are the characters for a cell from empty to full; " #" will do where a terminal has no others.
    """
    rates = [lr.at(step) for step in _spread(lr.steps, WIDTH)]
    rows = bars([rate / lr.peak for rate in rates], HEIGHT, blocks)
    labels = [f"{lr.peak:.2e}", *[""] * (HEIGHT - 2), "0"]
    margin = len(labels[0])
    lines = [f"{label:>{margin}} {row}".rstrip() for label, row in zip(labels, rows, strict=True)]
    return [*lines, f"{'':{margin}} {_ticks(lr, len(rates))}"]


def bars(shares: Sequence[float], height: int, blocks: str) -> list[str]:
    """A bar of up to `height` cells for each share of 1, as rows from the top."""
    parts = len(blocks) - 1
    filled = [round(share * height * parts) for share in shares]
    return [
        "".join(blocks[min(max(count - row * parts, 0), parts)] for count in filled) for row in reversed(range(height))
    ]


def _spread(steps: int, columns: int) -> list[int]:
    """Steps from the first to the last, no more than there are columns."""
    columns = min(columns, steps)
    return [round(column * (steps - 1) / max(1, columns - 1)) for column in range(columns)]


def _ticks(lr: LearningRate, columns: int) -> str:
    """Numbers of steps below their columns; the end of warm-up only where there is room for it."""
    last = f"{lr.steps:,} updates"
    line = "0".ljust(max(columns - len(last), 2)) + last
    at = round(lr.warmup_steps / lr.steps * columns)
    text = f"{lr.warmup_steps:,}"
    if at >= 2 and at + len(text) + 1 < columns - len(last):
        line = line[:at] + text + line[at + len(text) :]
    return line
