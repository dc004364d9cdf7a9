"""Trackers in the background: each in a thread, so that a slow or silent server never delays training."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from vit_scale.errors import first_line
from vit_scale.record.trackers import Tracker

Message = tuple[str, tuple[Any, ...]]
"""A method of a tracker and its arguments."""

START_TIMEOUT_S = 3.0
"""How long an evaluation waits for a tracker that starts; a slower one keeps starting in the background."""
CRASH_TIMEOUT_S = 5.0
MAX_QUEUED_MESSAGES = 10_000
"""A tracker that has fallen this many messages behind is given up."""
OPTIONAL = ("check", "image", "table", "weights")
"""If one of these fails, the tracker still gets the metrics."""


class TrackerThread:
    """Passes messages to one tracker, in the background. Any exception is reported once."""

    def __init__(self, tracker: Tracker, info: Callable[[str], None]) -> None:
        """`info` prints a line."""
        self.tracker = tracker
        self._info = info
        self._broken = False
        self._reported = False
        self._loaded, self._started = threading.Event(), threading.Event()
        self._messages: queue.Queue[Message | None] = queue.Queue(MAX_QUEUED_MESSAGES)
        self._thread = threading.Thread(target=self._run, name=f"tracker {tracker.name}", daemon=True)
        self._wait_until = 0.0
        self._first: Sequence[Message] = ()

    def start(self, first: Sequence[Message] = ()) -> None:
        """Let the tracker start: it gets `first`, then the messages sent so far."""
        if self._thread.ident is None:
            self._first = first
            self._thread.start()

    def wait_for_start(self) -> None:
        """Wait until the tracker is loaded and has started, but at most START_TIMEOUT_S for the latter.

        Called before processes are forked: a process that is forked while another thread imports finds the locks of
        those modules held indefinitely; while that thread starts a process, each could inherit the other's pipes.
        """
        self.start()
        self._loaded.wait()
        self._started.wait(max(0.0, self._wait_until - time.monotonic()))

    def send(self, method: str, *values: Any) -> None:
        """Call `method` of the tracker, soon."""
        if self._broken:
            return
        try:
            self._messages.put_nowait((method, values))
        except queue.Full:
            self._give_up("does not respond")

    def close(self) -> None:
        """Pass on all remaining messages, but wait no longer than the tracker may take."""
        self.send("finish")
        self._end(self.tracker.shutdown_timeout())
        if self._thread.is_alive():
            self._give_up("does not respond")

    def abandon(self) -> None:
        """Training has failed: pass on the messages sent so far, and report nothing more."""
        self._end(CRASH_TIMEOUT_S)
        self._reported = True

    def _end(self, seconds: float) -> None:
        self.start()
        with contextlib.suppress(queue.Full):
            self._messages.put_nowait(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self.tracker.load()
            self._wait_until = time.monotonic() + START_TIMEOUT_S
            self._loaded.set()
            self.tracker.start()
            self._started.set()
            for first in self._first:
                self._pass_on(*first)
            while (message := self._messages.get()) is not None:
                self._pass_on(*message)
        except Exception as error:  # noqa: BLE001 -- whatever it is, training continues
            self._give_up(f"cannot be used: {first_line(error)}")
        finally:
            self._loaded.set()
            self._started.set()

    def _pass_on(self, method: str, values: tuple[Any, ...]) -> None:
        try:
            getattr(self.tracker, method)(*values)
        except Exception as error:
            if method not in OPTIONAL:
                raise
            self._report(f"rejects the {method}: {first_line(error)}")

    def _give_up(self, problem: str) -> None:
        self._broken = True
        self._report(problem)

    def _report(self, problem: str) -> None:
        if not self._reported:
            self._info(f"{self.tracker.name} {problem}. Training continues; metrics.jsonl has everything.")
        self._reported = True
