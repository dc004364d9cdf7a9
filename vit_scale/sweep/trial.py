"""Run one trial of a sweep: start it, monitor its metrics.jsonl, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import psutil

from vit_scale.errors import did_you_mean

POLL_SECONDS = 0.2
# A run that is stopped saves a checkpoint first.
SHUTDOWN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """How a trial ended, and its last value of the metric."""

    kind: Literal["finished", "stopped", "failed"]
    value: float | None = None
    problem: str = ""
    metric_missing: bool = False


@dataclass
class Watch:
    """Reads the metric from metrics.jsonl whenever the file changes."""

    path: Path
    metric: str
    values: list[float]
    keys: dict[str, None]
    step: int = 0
    _seen: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, directory: Path, metric: str) -> Watch:
        return cls(directory / "metrics.jsonl", metric, [], {})

    def refresh(self) -> bool:
        """Read the file again; returns False if it has not changed."""
        try:
            stat = self.path.stat()
            if (stat.st_size, stat.st_mtime_ns) == self._seen:
                return False
            text = self.path.read_text()
        except OSError:
            return False
        self._seen = (stat.st_size, stat.st_mtime_ns)
        self.values = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # a partially written line
                self._add(json.loads(line))
        return True

    def _add(self, line: dict[str, float | None]) -> None:
        self.keys |= dict.fromkeys(line)
        self.step = int(line.get("step") or 0)
        value = line.get(self.metric)
        if value is not None:
            self.values.append(value)


def run_trial(
    command: Sequence[str],
    directory: Path,
    metric: str,
    *,
    judge: Callable[[int, float], bool],
    show: Callable[[int, float | None], None],
    stopping: Callable[[], None],
) -> Outcome:
    """Run `command`, which trains in `directory`, until it ends or `judge` returns True for an evaluation.

    `judge` receives the number of the evaluation, from 0, and its value; `show` receives the step and the last value.
    On Ctrl-C, `stopping` is called, the run is stopped, and KeyboardInterrupt is raised again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    watch = Watch.of(directory, metric)
    with (directory / "output.log").open("a") as log:
        try:
            process = _start(command, log)
        except OSError as error:
            return Outcome("failed", problem=f"cannot start {command[0]}: {error.strerror}")
        try:
            stopped = _follow(process, watch, judge, show)
        except BaseException:
            stopping()
            stop(process)
            raise
    if stopped:
        return Outcome("stopped", watch.values[-1])
    return _outcome(process.returncode, watch, directory / "output.log")


def _start(command: Sequence[str], log: IO[str]) -> subprocess.Popen[bytes]:
    """Start in a separate session: Ctrl-C reaches only the sweep, which then stops the run gracefully."""
    # `python` and `accelerate` in the command refer to this environment, activated or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.Popen(
        command,
        env=os.environ | {"PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _follow(
    process: subprocess.Popen[bytes],
    watch: Watch,
    judge: Callable[[int, float], bool],
    show: Callable[[int, float | None], None],
) -> bool:
    """Monitor the run until it ends; returns whether it was stopped early by `judge`."""
    judged = 0
    while True:
        running = process.poll() is None
        if watch.refresh():
            show(watch.step, watch.values[-1] if watch.values else None)
        for number in range(judged, len(watch.values)):
            if judge(number, watch.values[number]) and running:
                stop(process)
                return True
        judged = len(watch.values)
        if not running:
            return False
        time.sleep(POLL_SECONDS)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, so that the run saves a checkpoint; kill it after a timeout or a second Ctrl-C."""
    process.terminate()
    try:
        process.wait(SHUTDOWN_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _outcome(status: int, watch: Watch, log: Path) -> Outcome:
    if status != 0:
        return Outcome("failed", problem=f"{last_error_line(log)} (exit code {status})")
    if not watch.values:
        hint = did_you_mean(watch.metric, watch.keys) or f"logged: {', '.join(watch.keys) or 'nothing'}"
        return Outcome("failed", problem=f"never logged {watch.metric}; {hint}", metric_missing=True)
    return Outcome("finished", watch.values[-1])


def find_trainer(directory: Path) -> int | None:
    """Return the ID of a process that is training in `directory`, started by a killed or a second sweep, or None."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        same_cwd = process.info["cwd"] == os.getcwd()
        if same_cwd and f"run.dir={directory}" in (process.info["cmdline"] or ()):
            return process.pid
    return None


def last_error_line(log: Path) -> str:
    """Return the line of `log` that best explains a failure: its last error, otherwise its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1]
