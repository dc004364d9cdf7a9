"""What the user sees in the terminal: the header, progress, evaluations, the summary.

In a terminal the progress is one live bar; in a log file it is a line per logged step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from vit_scale.format import duration
from vit_scale.tasks.task import Metric

PIPE_WIDTH = 120


class Terminal:
    """Prints for the main rank; on other ranks every method does nothing."""

    def __init__(self, *, enabled: bool, steps: int = 0, metrics: Sequence[Metric] = ()) -> None:
        """`steps` is the length of the run, `metrics` what an evaluation reports."""
        self.enabled = enabled
        self.console = Console(quiet=not enabled, highlight=False, width=None)
        if not self.console.is_terminal:
            self.console.width = PIPE_WIDTH
        self._steps, self._metrics = steps, metrics
        self._bar: Progress | None = None
        self._started: tuple[float, int] | None = None

    def info(self, text: str) -> None:
        """Print a line."""
        self.console.print(escape(text), soft_wrap=True)

    def table(self, title: str, rows: dict[str, str]) -> None:
        """Print a title and aligned `name  value` lines."""
        self.console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
        width = max(map(len, rows))
        for name, value in rows.items():
            self.console.print(f"[dim]{name:<{width}}[/dim]  {escape(value)}", soft_wrap=True)

    def start(self, step: int) -> None:
        """Start the progress at `step`."""
        self._started = (time.perf_counter(), step)
        if self.enabled and self.console.is_terminal:
            columns = (
                TextColumn("step {task.completed:,}/{task.total:,}"),
                BarColumn(24),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.add_task("", total=self._steps, completed=step)
            self._bar.start()

    def advance(self, step: int) -> None:
        """Move the bar; cheap enough for every step."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def progress(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of a logged step."""
        text = (
            f"loss {metrics['train/loss']:.4f}  lr {metrics['train/lr']:.2e}  "
            f"{metrics['speed/images_per_second']:,.0f} images/s  ETA {duration(self._seconds_left(step))}"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)
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
        self.info(f"eval {self._position(step)}  {'  '.join(parts)}")

    def stop(self) -> None:
        """End the progress; the lines above it stay."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def summary(self, rows: dict[str, str], commands: dict[str, str]) -> None:
        """Print the results of a finished run, and the commands to try next with their purpose."""
        self.console.print()
        self.table("Finished", rows)
        self.console.print("[bold]Next[/bold]")
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
