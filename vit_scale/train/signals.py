"""Ctrl-C, scheduler signals and the clock of checkpoints: all ranks agree on the step at which they act."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist

EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGPIPE: 141}
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Request(NamedTuple):
    """What all ranks have agreed to do after a step."""

    signal: signal.Signals | None
    """Stop because of it."""
    save: bool
    """Save a checkpoint: the last one is old."""


class Interrupt:
    """Watch for SIGINT, SIGTERM and SIGUSR1 inside the context, for an output that was closed, and for the time.

    `agreed()` is called once per step, and once per batch of an evaluation. With several processes the request of each
    call is exchanged in the background over gloo and read one call later, so that all act after the same step without
    waiting for each other. A second Ctrl-C ends the process immediately.
    """

    def __init__(
        self,
        timeout_seconds: float = 600.0,
        *,
        save_seconds: float = 0.0,
        is_closed: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare; nothing is watched before the context is entered.

        Args:
            timeout_seconds: how long a process waits for the request of another before it is considered failed.
            save_seconds: maximum time between two checkpoints, by the clock of rank 0; 0: no limit.
            is_closed: whether the reader of the output has left, which counts as SIGPIPE.
        """
        self._timeout = timedelta(seconds=timeout_seconds)
        self._save_seconds, self._is_closed = save_seconds, is_closed
        self._saved = time.monotonic()
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> Interrupt:
        for number in HANDLED:
            self._previous[number] = signal.signal(number, self._receive)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)  # type: ignore[assignment]
        self.restart_clock()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)

    def restart_clock(self) -> None:
        """Count the time to the next checkpoint from now on."""
        self._saved = time.monotonic()

    def agreed(self) -> Request:
        """Return what all processes have agreed to do."""
        if self.received is None and self._is_closed():
            self.received = signal.SIGPIPE
        ours = [int(self.received or 0), int(self._is_save_due())]
        if self._group is None:
            return _request(ours)
        agreed = [0, 0]
        if self._pending is not None:
            work, request = self._pending
            work.wait()
            agreed = request.tolist()
        request = torch.tensor(ours)
        self._pending = (dist.all_reduce(request, op=dist.ReduceOp.MAX, group=self._group, async_op=True), request)
        return _request(agreed)

    def _is_save_due(self) -> bool:
        if not self._save_seconds or (self._group is not None and dist.get_rank() != 0):
            return False
        is_due = time.monotonic() - self._saved >= self._save_seconds
        if is_due:  # The checkpoint follows one step later: do not request another one until then.
            self.restart_clock()
        return is_due


def _request(values: list[int]) -> Request:
    return Request(signal.Signals(values[0]) if values[0] else None, bool(values[1]))
