"""One training of a sweep: started, watched through its metrics.jsonl, stopped."""

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
# A training that is told to stop writes a checkpoint first.
SECONDS_TO_STOP = 300.0


@dataclass(frozen=True)
class Outcome:
    """How a training ended, with its last value of the metric."""

    kind: Literal["finished", "stopped", "failed"]
    value: float | None = None
    problem: str = ""
    metric_missing: bool = False


@dataclass
class Watch:
    """Reads the metric from metrics.jsonl each time the file has changed."""

    path: Path
    metric: str
    values: list[float]
    keys: dict[str, None]
    step: int = 0
    _seen: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, folder: Path, metric: str) -> Watch:
        return cls(folder / "metrics.jsonl", metric, [], {})

    def look(self) -> bool:
        """Read again; False where nothing has changed."""
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
            with contextlib.suppress(ValueError):  # a line that is being written
                self._take(json.loads(line))
        return True

    def _take(self, line: dict[str, float | None]) -> None:
        self.keys |= dict.fromkeys(line)
        self.step = int(line.get("step") or 0)
        value = line.get(self.metric)
        if value is not None:
            self.values.append(value)


def run_training(
    command: Sequence[str],
    folder: Path,
    metric: str,
    *,
    judge: Callable[[int, float], bool],
    show: Callable[[int, float | None], None],
    stopping: Callable[[], None],
) -> Outcome:
    """Run `command`, which trains in `folder`, to its end, or until `judge` of an evaluation (its number, from 0, and
    its value) says to stop. `show` is told the step and the last value.

    Ctrl-C stops the training, which `stopping` is told before, and is then raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    watch = Watch.of(folder, metric)
    with (folder / "output.log").open("a") as log:
        try:
            process = _start(command, log)
        except OSError as error:
            return Outcome("failed", problem=f"{command[0]} cannot be started: {error.strerror}")
        try:
            stopped = _follow(process, watch, judge, show)
        except BaseException:
            stopping()
            stop(process)
            raise
    if stopped:
        return Outcome("stopped", watch.values[-1])
    return _outcome(process.returncode, watch, folder / "output.log")


def _start(command: Sequence[str], log: IO[str]) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C reaches the sweep alone, which then ends the training in order."""
    # `python` and `accelerate` in the command are to be those of this environment, activated or not.
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
    """Until the training ends (False), or is stopped because of what it reached (True)."""
    judged = 0
    while True:
        running = process.poll() is None
        if watch.look():
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
    """SIGTERM, so that it saves and ends; whatever is left after a while, or at a second Ctrl-C, is killed."""
    process.terminate()
    try:
        process.wait(SECONDS_TO_STOP)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _outcome(status: int, watch: Watch, log: Path) -> Outcome:
    if status != 0:
        return Outcome("failed", problem=f"{last_words(log)} (exit status {status})")
    if not watch.values:
        hint = did_you_mean(watch.metric, watch.keys) or f"it logged {', '.join(watch.keys) or 'nothing'}"
        return Outcome("failed", problem=f"it never logged {watch.metric}; {hint}", metric_missing=True)
    return Outcome("finished", watch.values[-1])


def find_trainer(folder: Path) -> int | None:
    """The id of a process that trains in `folder` now: of a sweep that was killed, or of a second one."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        here = process.info["cwd"] == os.getcwd()
        if here and f"run.dir={folder}" in (process.info["cmdline"] or ()):
            return process.pid
    return None


def last_words(log: Path) -> str:
    """The line of `log` that says best why a training failed: its last error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1]
