"""Progress of what takes long: live bars in a terminal, a line now and then in a log file."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Task as Bar
from rich.text import Text

from vit_scale.format import duration

SIGN_S = 4.0
"""A log file gets a line when something has taken this long, and again while the run is new."""
SIGNS_PER_RUN = 0.01
"""Fraction of the time since the start between two further lines: a run of a week adds some 800."""


@dataclass
class Activity:
    """Something that takes long, such as opening the data."""

    name: str
    total: int | None = None
    """Units of work, if known."""
    done: int = 0
    detail: str = ""
    """Shown next to the name."""
    timed: bool = True
    """Show the time since it began."""
    on_change: Callable[[Activity], None] = lambda activity: None
    since: float = field(default_factory=time.monotonic)

    def next(self, name: str) -> None:
        """Continue with the next thing."""
        self.name, self.total, self.done, self.detail, self.since = name, None, 0, "", time.monotonic()
        self.on_change(self)

    def advance(self, units: int = 1) -> None:
        """Report `units` of work as done."""
        self.move_to(self.done + units)

    def move_to(self, done: int) -> None:
        """Report how many units are done."""
        self.done = done
        self.on_change(self)

    def show(self, detail: str) -> None:
        """Show `detail` next to the name."""
        self.detail = detail
        self.on_change(self)

    def label(self) -> str:
        """`Opening data`, or `Evaluating 3/12` if the amount of work is known."""
        return f"{self.name} {self.done:,}/{self.total:,}" if self.total is not None else self.name


class OutputConsole(Console):
    """A console whose reader may leave (`... | head`): from then on it prints nothing and `is_closed`."""

    is_closed = False

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except BrokenPipeError:  # raised here by versions of rich without `on_broken_pipe`
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.is_closed = self.quiet = True
        with suppress(OSError, ValueError):  # What Python has buffered would fail again at exit.
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.file.fileno())
            os.close(devnull)


class LiveBars:
    """One live line per activity at the bottom of a terminal; nothing of them stays."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), _Label(), BarColumn(24), _Elapsed(), TextColumn("{task.description}", markup=False))
        self._progress = Progress(*columns, console=console, transient=True, get_time=time.monotonic)
        self._bars: dict[int, TaskID] = {}

    def begin(self, activity: Activity) -> None:
        """Show a line for `activity`."""
        self._bars[id(activity)] = self._progress.add_task("", total=activity.total, activity=activity)
        self._progress.start()

    def end(self, activity: Activity) -> None:
        """Remove the line of `activity`."""
        self._progress.remove_task(self._bars.pop(id(activity)))
        if not self._bars:
            self._progress.stop()

    def update(self, activity: Activity) -> None:
        """Move the bar; cheap enough for every step."""
        self._progress.update(
            self._bars[id(activity)], completed=activity.done, total=activity.total, description=activity.detail
        )

    def touch(self) -> None:
        """Do nothing: bars move by themselves."""


class _Label(ProgressColumn):
    max_refresh = None

    def render(self, task: Bar) -> Text:
        return Text(task.fields["activity"].label())


class _Elapsed(TimeElapsedColumn):
    """Time since an activity began."""

    def render(self, task: Bar) -> Text:
        activity = task.fields["activity"]
        seconds = time.monotonic() - activity.since
        return Text(duration(seconds) if activity.timed and seconds >= 1 else "", "dim")


class Signs:
    """Lines in a log file about an activity during which nothing else is printed, fewer the longer the run."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print = print_line
        self._activities: list[Activity] = []
        self._started = self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def begin(self, activity: Activity) -> None:
        """Watch `activity`."""
        self._activities.append(activity)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
            self._thread.start()

    def end(self, activity: Activity) -> None:
        """Watch `activity` no longer."""
        self._activities.remove(activity)
        if not self._activities and self._thread is not None:
            self._wake.set()
            self._thread.join()
            self._wake.clear()
            self._thread = None

    def update(self, activity: Activity) -> None:
        """Do nothing: the activity is read when a line is due."""

    def touch(self) -> None:
        """Note that a line was printed."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while not self._wake.wait(0.5):
            if line := self.due(time.monotonic()):
                self._print(line)

    def due(self, now: float) -> str | None:
        """Return the line to print now, if any."""
        activity = self._activities[-1] if self._activities else None
        if activity is None:
            return None
        is_first = self._last <= activity.since
        pause = SIGN_S if is_first else max(SIGN_S, SIGNS_PER_RUN * (now - self._started))
        if now - max(self._last, activity.since) < pause:
            return None
        detail = f": {activity.detail}" if activity.detail else ""
        return f"{activity.label()}{detail} ({duration(now - activity.since)})"


@contextmanager
def library_bars(show: Callable[[str], None]) -> Iterator[None]:
    """Pass the text of tqdm's bars, such as those of `datasets` and the Hub, to `show` instead of printing them."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if tqdm is None:
        yield
        return
    original, sink = tqdm.__init__, _BarText(show)

    def captured(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args[:3], **options | {"file": sink, "leave": False})  # they are its fourth and fifth

    tqdm.__init__ = captured
    try:
        yield
    finally:
        tqdm.__init__ = original


class _BarText:
    """The file that captured bars write to."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def write(self, text: str) -> None:
        self._show(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).strip())

    def flush(self) -> None:
        """Nothing is buffered."""

    def isatty(self) -> bool:
        """Otherwise some bars would be disabled."""
        return True
