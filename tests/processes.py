"""Runs scripts on several processes as a launcher does, but with libraries that are imported once per test session.

A process that trains spends its first seconds importing torch, timm and DeepSpeed. A forkserver imports them once; each
process is a child of it. Launchers themselves are tested in tests/launch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.workers import preloaded

ROOT = Path(__file__).resolve().parent.parent


def start_process(target: Callable[..., None], *arguments: object, **options: object) -> BaseProcess:
    """Start `target`, a function of tests/workers/preloaded.py, in a process that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded.LIBRARIES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("DS_ACCELERATOR", "cpu")  # DeepSpeed would look for one, and say so
        forkserver.ensure_running()
        process = context.Process(target=target, args=arguments, kwargs=options)
        process.start()
    return process


def kill(processes: list[BaseProcess]) -> None:
    """Leave nothing of these processes, nor of those that they have started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]


def rank_variables(processes: int) -> list[dict[str, str]]:
    """Return what a launcher sets for each of its processes."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    common = world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def run_script(
    script: str, *arguments: object, processes: int = 1, timeout: float = 240, **env: str
) -> subprocess.CompletedProcess:
    """Run a script of the repository on `processes` processes from the repository's folder.

    All of them are killed as soon as one fails; the status is that of the first that failed.
    """
    words, deadline = [str(word) for word in arguments], time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        started: list[BaseProcess] = []
        try:
            for variables in rank_variables(processes):
                environment = os.environ | env | variables
                started.append(start_process(preloaded.run, script, words, dict(environment), tuple(map(str, outputs))))
            status = _first_failure(started, deadline)
        finally:
            kill(started)
        said = [output.read_text() if output.exists() else "" for output in outputs]
    if status is None:
        raise subprocess.TimeoutExpired([script, *words], timeout, *said)
    return subprocess.CompletedProcess([script, *words], status, *said)


def _first_failure(started: list[BaseProcess], deadline: float) -> int | None:
    """Return the first status other than 0, 0 if all processes succeed, and None if they do not end."""
    running = {process.sentinel: process for process in started}
    while running:
        ended = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ended:
            return None
        for sentinel in ended:
            process = running.pop(sentinel)  # type: ignore[call-overload]
            process.join()
            if process.exitcode:
                return process.exitcode
    return 0
