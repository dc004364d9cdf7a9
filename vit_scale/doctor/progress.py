"""Show which check is running; nothing is silent for more than a few seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console

from vit_scale.doctor.isolation import Probe, Watcher
from vit_scale.record.terminal import PIPE_WIDTH

SILENT_SECONDS = 4.0


class Progress(Watcher):
    """A live line in a terminal; in a pipe a line for each group, and another whenever a check takes long.

    It is printed to stderr, so that stdout has the table or the report alone.
    """

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False)
        if not self.console.is_terminal:
            self.console.width = PIPE_WIDTH
        self._checks, self._done = 0, 0
        self._group, self._text, self._stage = "", "looking for GPUs", ""
        self._started = self._printed = time.monotonic()
        self._line = self.console.status("") if self.console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._line is not None:
            self._line.start()
        self._show(always=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._line is not None:
            self._line.stop()

    def expect(self, checks: int) -> None:
        """Set the number of checks."""
        self._checks = checks

    def start(self, probe: Probe) -> None:
        """Show the next check."""
        is_new_group, self._group = self._group != probe.group, probe.group
        self._done += 1
        self._text, self._stage = f"{self._done}/{self._checks}  {probe.group}: {probe.name}", ""
        self._started = time.monotonic()
        self._show(always=is_new_group)

    def stage(self, text: str) -> None:
        """Show what the check is doing."""
        self._stage = text
        self._show()

    def tick(self) -> None:
        """Show that the check is still running."""
        self._show()

    def _show(self, *, always: bool = False) -> None:
        now = time.monotonic()
        seconds = now - self._started
        text = f"{self._text}, {self._stage}" if self._stage else self._text
        text += f" ({seconds:.0f} s)" if seconds >= 1 else ""
        if self._line is not None:
            self._line.update(text)
        elif always or now - self._printed >= SILENT_SECONDS:
            self.console.print(text)
            self._printed = now
