"""Run the timm check in a separate process during startup: importing timm takes two seconds."""

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

TIMEOUT_S = 30.0


class BackgroundCheck:
    """Start the check on construction, ideally before importing torch; call `result` once the data is known.

    If `in_background` is false or the process cannot be started, the check runs in this process.
    """

    def __init__(self, model: ModelConfig, *, in_background: bool = True) -> None:
        self._model = model
        self._worker: tuple[BaseProcess, Connection] | None = None
        if in_background and sys.platform == "linux":
            with contextlib.suppress(OSError):  # process limit reached, or out of memory
                self._worker = _start_worker(model)

    def result(self, num_classes: int, in_chans: int) -> TimmCheck:
        """Return the result for a model with `num_classes` classes and `in_chans` channels."""
        return self._worker_result(num_classes, in_chans) or _check(self._model, num_classes, in_chans)

    def _worker_result(self, num_classes: int, in_chans: int) -> TimmCheck | None:
        """Return the result of the worker process, or None if it fails; the process has ended afterwards."""
        if self._worker is None:
            return None
        (process, connection), self._worker = self._worker, None
        try:
            connection.send((num_classes, in_chans))
            return connection.recv() if connection.poll(TIMEOUT_S) else None
        except (EOFError, OSError):
            return None
        finally:
            connection.close()
            process.kill()
            process.join()


def _start_worker(model: ModelConfig) -> tuple[BaseProcess, Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_work, args=(model, ours, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _work(model: ModelConfig, parent: Connection, connection: Connection) -> None:
    parent.close()  # Otherwise this process would not notice that its parent has exited.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(19)  # Use idle cores only: do not disturb the peak measurement or the first step.
    gc.disable()
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type] # timm imports it if present and works without it.
    try:
        import timm  # noqa: F401 -- the slow part

        num_classes, in_chans = connection.recv()
        connection.send(_check(model, num_classes, in_chans))
    except Exception:  # noqa: BLE001 -- the parent then runs the check itself and reports the error
        connection.close()


def _check(model: ModelConfig, num_classes: int, in_chans: int) -> TimmCheck:
    from vit_scale.cost.timm_check import check_against_timm

    return check_against_timm(model, num_classes=num_classes, in_chans=in_chans)
