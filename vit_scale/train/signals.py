"""Ctrl-C and scheduler signals: finish the step, save a checkpoint, and print how to resume."""

from __future__ import annotations

import signal
from datetime import timedelta
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 138}


class Interrupt:
    """Watch for SIGINT, SIGTERM and SIGUSR1 inside the context.

    `agreed()` is called once per step. With several processes the flag of each step is exchanged in the background over
    gloo and read one step later, so that all stop after the same step without waiting for each other.
    A second Ctrl-C ends the process immediately.
    """

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        """`timeout_seconds`: how long a process waits for the flag of another before it is considered failed."""
        self._timeout = timedelta(seconds=timeout_seconds)
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> Interrupt:
        for number in EXIT_STATUS:
            self._previous[number] = signal.signal(number, self._receive)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)  # type: ignore[assignment]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)

    def agreed(self) -> signal.Signals | None:
        """Return the signal that all processes have agreed to stop for, if any."""
        if self._group is None:
            return self.received
        agreed = 0
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            agreed = int(flag.item())
        flag = torch.tensor([int(self.received or 0)])
        self._pending = (dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True), flag)
        return signal.Signals(agreed) if agreed else None
