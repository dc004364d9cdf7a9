"""What the user sees: the header, the progress, evaluation lines, the summary.

In a terminal the progress is one live bar; in a log file it is a line at each logged step.
"""

from __future__ import annotations

import os
import time

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from vit_scale.format import duration, percent


class Screen:
    """Speaks for the main process; on the others every method does nothing."""

    def __init__(self, *, enabled: bool, steps: int = 0) -> None:
        self.enabled = enabled
        self.console = Console(quiet=not enabled, highlight=False, width=None)
        if not self.console.is_terminal:
            self.console.width = 120
        self._steps = steps
        self._bar: Progress | None = None
        self._rate: tuple[float, int] | None = None

    def say(self, text: str) -> None:
        """A plain line."""
        self.console.print(escape(text), soft_wrap=True)

    def table(self, title: str, rows: dict[str, str]) -> None:
        """A title and aligned `name  value` lines."""
        self.console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
        width = max(map(len, rows))
        for name, value in rows.items():
            self.console.print(f"[dim]{name:<{width}}[/dim]  {escape(value)}", soft_wrap=True)

    def start(self, step: int) -> None:
        """Begin the progress at `step`."""
        self._rate = (time.perf_counter(), step)
        if self.enabled and self.console.is_terminal:
            columns = (
                TextColumn("step {task.completed:,} of {task.total:,}"),
                BarColumn(24),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.add_task("", total=self._steps, completed=step)
            self._bar.start()

    def advance(self, step: int) -> None:
        """Cheap enough for every step."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def progress(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of a logged step."""
        text = (
            f"loss {metrics['train/loss']:.4f}  lr {metrics['train/lr']:.2e}  "
            f"{metrics['speed/images_per_second']:,.0f} images/s  {duration(self._left(step))} left"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        else:
            width = len(f"{self._steps:,}")
            self.say(f"step {step:>{width},} of {self._steps:,}  {text}")

    def _left(self, step: int) -> float:
        started, first = self._rate or (time.perf_counter(), step)
        return (time.perf_counter() - started) / max(1, step - first) * (self._steps - step)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """One line: accuracy of the raw and of the averaged weights."""
        parts = [f"top-1 {percent(metrics['val/top1'])}", f"loss {metrics['val/loss']:.4f}"]
        if "val_ema/top1" in metrics:
            parts.append(f"| EMA top-1 {percent(metrics['val_ema/top1'])}, loss {metrics['val_ema/loss']:.4f}")
        self.say(f"  evaluation after {step:,} steps: {'  '.join(parts)}")

    def stop(self) -> None:
        """End the progress; the lines above stay."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def summary(self, rows: dict[str, str], commands: dict[str, str]) -> None:
        """The end: results, and the commands worth typing next with what they do."""
        self.console.print()
        self.table("Finished", rows)
        self.console.print("[bold]Next[/bold]")
        for command, what in commands.items():
            self.say(f"  {command}    # {what}")


PIPE_WIDTH = 120


def make_console() -> Console:
    """Standard output; a pipe has PIPE_WIDTH columns unless COLUMNS says otherwise."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def make_table(*headings: str, title: str | None = None, gap: int = 2) -> Table:
    """A table without lines but the one below the headings; the first column is text, the others are numbers."""
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
