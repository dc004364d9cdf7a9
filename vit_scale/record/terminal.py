"""What the user sees in the terminal: the header, progress, evaluations, the summary.

In a terminal the progress is live bars; in a log file it is a line per logged step, and a line about whatever takes
long. This module does not import torch, so that a run prints something before torch is imported.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vit_scale.format import duration
from vit_scale.record.progress import Activity, LiveBars, OutputConsole, Signs, library_bars

if TYPE_CHECKING:
    from vit_scale.tasks.task import Metric

PIPE_WIDTH = 120


class Terminal:
    """Prints for the main rank; on other ranks every method does nothing."""

    def __init__(self, *, enabled: bool, stderr: bool = False) -> None:
        """`stderr`: print there, because the standard output is for results."""
        self.enabled = enabled
        self.console = OutputConsole(quiet=not enabled, highlight=False, stderr=stderr)
        if not self.console.is_terminal:
            self.console.width = PIPE_WIDTH
        self._steps = 0
        self._metrics: Sequence[Metric] = ()
        self._training: Activity | None = None
        self._started: tuple[float, int] | None = None
        self._display: LiveBars | Signs | None = None
        if enabled:
            self._display = LiveBars(self.console) if self.console.is_terminal else Signs(self.info)

    @property
    def is_closed(self) -> bool:
        """Whether the output is a pipe whose reader has left."""
        return self.console.is_closed

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Activity]:
        """Show what is in progress, and bars of libraries with it; `total`: units of work, if known."""
        activity = self._begin(Activity(name, total))
        try:
            with library_bars(activity.show):
                yield activity
        finally:
            self._end(activity)

    def _begin(self, activity: Activity) -> Activity:
        if self._display is not None:
            activity.on_change = self._display.update
            self._display.begin(activity)
        return activity

    def _end(self, activity: Activity) -> None:
        if self._display is not None:
            self._display.end(activity)

    def info(self, text: str) -> None:
        """Print a line."""
        self.console.print(escape(text), soft_wrap=True)
        if self._display is not None:
            self._display.touch()

    def last_words(self, text: str) -> None:
        """Print a line that must be read: to standard error if nobody reads the output any more."""
        self.info(text)
        if self.enabled and self.is_closed:
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def title(self, text: str) -> None:
        """Print a line in bold."""
        self.console.print(f"[bold]{escape(text)}[/bold]", soft_wrap=True)

    def rows(self, rows: dict[str, str]) -> None:
        """Print aligned `name  value` lines."""
        width = max(map(len, rows))
        for name, value in rows.items():
            self.console.print(f"[dim]{name:<{width}}[/dim]  {escape(value)}", soft_wrap=True)

    def start(self, step: int, steps: int, metrics: Sequence[Metric]) -> None:
        """Start the progress of a run of `steps` steps at `step`; `metrics` is what an evaluation reports."""
        self._steps, self._metrics = steps, metrics
        self._started = (time.perf_counter(), step)
        self._training = self._begin(Activity("step", steps, step, timed=False))

    def advance(self, step: int) -> None:
        """Move the bar; cheap enough for every step."""
        if self._training is not None:
            self._training.move_to(step)

    def progress(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of a logged step."""
        text = (
            f"loss {metrics['train/loss']:.4f}  lr {metrics['train/lr']:.2e}  "
            f"{metrics['speed/images_per_second']:,.0f} images/s  ETA {duration(self._seconds_left(step))}"
        )
        if isinstance(self._display, LiveBars) and self._training is not None:
            self._training.show(text)
        else:
            self.info(f"step {self._position(step)}  {text}")

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Print one line: the metrics of the raw and of the EMA weights."""
        parts = [
            f"{prefix}{metric.label} {metric.text(metrics[key])}"
            for section, prefix in (("val", ""), ("val_ema", "EMA "))
            for metric in self._metrics
            if metric.brief and (key := f"{section}/{metric.name}") in metrics
        ]
        if parts:  # The attention is logged only.
            self.info(f"eval {self._position(step)}  {'  '.join(parts)}")

    def stop(self) -> None:
        """End the progress; the lines above it stay."""
        if self._training is not None:
            self._end(self._training)
        self._training = None

    def summary(self, rows: dict[str, str], commands: dict[str, str]) -> None:
        """Print the results of a finished run, and the commands to try next with their purpose."""
        self.console.print()
        self.title("Finished")
        self.rows(rows)
        self.title("Next")
        for command, purpose in commands.items():
            self.info(f"  {command}    # {purpose}")

    def _position(self, step: int) -> str:
        total = f"{self._steps:,}"
        return f"{step:>{len(total)},}/{total}"

    def _seconds_left(self, step: int) -> float:
        started, first = self._started or (time.perf_counter(), step)
        return (time.perf_counter() - started) / max(1, step - first) * (self._steps - step)


def make_console() -> Console:
    """Return standard output; a pipe has PIPE_WIDTH columns unless COLUMNS is set."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def make_table(*headings: str, title: str | None = None, gap: int = 2) -> Table:
    """Return a table whose only line is below the headings; the first column is text, the others are numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
    )
    for i, heading in enumerate(headings):
        justify, overflow = ("right", "ellipsis") if i else ("left", "fold")
        table.add_column(heading, justify=justify, no_wrap=i > 0, overflow=overflow, vertical="bottom")  # type: ignore[arg-type]
    return table
