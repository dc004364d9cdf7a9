"""Terminal output of a sweep: one line per trial, and in a terminal a live progress line below."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vit_scale.sweep.results import show_value
from vit_scale.sweep.trial import Outcome


class Display:
    """Prints trials; shows the live progress line while used as a context manager."""

    def __init__(self, metric: str, count: int, done: int) -> None:
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = 120
        self._metric, self._count, self._done = metric, count, done
        self._started, self._trial = 0.0, 0
        columns = (BarColumn(24), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("", total=count, completed=done)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def info(self, text: str) -> None:
        """Print a message."""
        self.console.print(escape(text), soft_wrap=True)

    def begin(self, number: int, values: Mapping[str, Any], resumed: bool) -> None:
        """Report that a trial starts or resumes."""
        self._started = time.monotonic()
        self._trial = number
        verb = "resumes" if resumed else "starts"
        self.info(f"trial {number} {verb} ({self._done + 1}/{self._count}): {describe(values)}")
        self.progress(0, None)

    def progress(self, step: int, value: float | None) -> None:
        """Report the current step of the trial."""
        metric = "" if value is None else f"  {self._metric} {value:.4f}"
        self._bar.update(self._task, description=f"trial {self._trial}  step {step:,}{metric}")

    def end(self, number: int, outcome: Outcome, best: float | None) -> None:
        """Report that a trial has ended."""
        seconds = time.monotonic() - self._started
        if outcome.kind == "failed":
            self.info(f"trial {number} failed after {seconds:.0f}s: {outcome.problem}")
        else:
            self._done += 1
            result = "finished" if outcome.kind == "finished" else "stopped early"
            best_so_far = "" if best is None else f", best so far {best:.4f}"
            self.info(f"trial {number} {result} after {seconds:.0f}s: {self._metric} {outcome.value:.4f}{best_so_far}")
        self._bar.update(self._task, completed=self._done)


def describe(values: Mapping[str, Any]) -> str:
    """Format as `optim.lr=0.001 optim.weight_decay=0.05`."""
    return " ".join(f"{key}={show_value(value)}" for key, value in values.items())
