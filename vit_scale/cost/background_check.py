"""The check against timm in a process of its own, beside the start of a run: importing timm takes two seconds."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from vit_scale.config import ModelConfig

if TYPE_CHECKING:
    from vit_scale.cost.timm_check import TimmCheck

SECONDS_AT_MOST = 30.0


class BackgroundCheck:
    """Begins when it is made, best before torch is imported; `result` is asked for once the data is known.

    Without `aside`, and where the other process cannot be had, the check is made in this one.
    """

    def __init__(self, model: ModelConfig, *, aside: bool = True) -> None:
        self._model = model
        self._other: tuple[BaseProcess, Connection] | None = None
        if aside and sys.platform == "linux":
            with contextlib.suppress(OSError):  # No more processes, or no memory for one.
                self._other = _begin(model)

    def result(self, num_classes: int, in_chans: int) -> TimmCheck:
        """The outcome for a model of so many classes and channels."""
        return self._ask(num_classes, in_chans) or _check(self._model, num_classes, in_chans)

    def _ask(self, num_classes: int, in_chans: int) -> TimmCheck | None:
        """The other process's answer, if it gives one; it is gone afterwards."""
        if self._other is None:
            return None
        (process, connection), self._other = self._other, None
        try:
            connection.send((num_classes, in_chans))
            return connection.recv() if connection.poll(SECONDS_AT_MOST) else None
        except (EOFError, OSError):
            return None
        finally:
            connection.close()
            process.kill()
            process.join()


def _begin(model: ModelConfig) -> tuple[BaseProcess, Connection]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(model, here, there), daemon=True)
    process.start()
    there.close()
    return process, here


def _answer(model: ModelConfig, asking: Connection, connection: Connection) -> None:
    asking.close()  # So that the end of the asking process is seen here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(19)  # For a core that is idle: neither the peak that is measured nor the first update is to suffer.
    gc.disable()
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type] # timm would import it, and does without.
    try:
        import timm  # noqa: F401 -- what takes the time

        num_classes, in_chans = connection.recv()
        connection.send(_check(model, num_classes, in_chans))
    except Exception:  # noqa: BLE001 -- the process that asks then makes the check itself, and tells of it
        connection.close()


def _check(model: ModelConfig, num_classes: int, in_chans: int) -> TimmCheck:
    from vit_scale.cost.timm_check import check_against_timm

    return check_against_timm(model, num_classes=num_classes, in_chans=in_chans)
