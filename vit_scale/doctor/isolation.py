"""Run checks in child processes: a crash, a hang or an illegal instruction ends one check and no other.

A child runs one check after another, so that libraries are imported once. When it dies, the check it was at is broken,
and another child continues with the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from vit_scale.doctor.check import ROOT, Check, Setup, broken

POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
"""How long the other ranks may run after one has failed."""
LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_"),
    *("ACCELERATE_", "TORCHELASTIC_", "SLURM_"),
)
"""Variables, or their beginnings, that a launcher has set for its own processes."""


@dataclass(frozen=True)
class Probe:
    """A function that returns checks, and how to run it."""

    name: str
    group: str
    function: str
    """`module:function`"""
    arguments: dict[str, Any] = field(default_factory=dict)
    processes: Literal["one", "cpu", "all"] = "one"
    """One process, one process that sees no GPU, or `Setup.processes` ranks."""
    timeout: float = 120.0
    """Seconds."""
    advice: str = ""
    """What to do if it crashes or hangs."""
    required: bool = True


class Watcher:
    """Follows the progress; the methods do nothing by default."""

    def start(self, probe: Probe) -> None:
        """A probe starts."""

    def stage(self, text: str) -> None:
        """The current probe shows what it is doing."""

    def tick(self) -> None:
        """Called several times per second."""


def run_probes(probes: Sequence[Probe], setup: Setup, watcher: Watcher) -> Iterator[tuple[Probe, list[Check]]]:
    """Run `probes` in order and yield the results of each."""
    remaining = list(probes)
    while remaining:
        kind = _kind(remaining[0], setup)
        count = next((i for i, probe in enumerate(remaining) if _kind(probe, setup) != kind), len(remaining))
        finished = 0
        for result in _Children(remaining[:count], setup, watcher).results():
            yield remaining[finished], result
            finished += 1
        remaining = remaining[finished:]


def _kind(probe: Probe, setup: Setup) -> str:
    """Return which processes the probe needs; without GPUs there are none to hide."""
    return "one" if probe.processes == "cpu" and not setup.gpus else probe.processes


class _Children:
    """The ranks that run some probes, until the first that fails or hangs."""

    def __init__(self, probes: Sequence[Probe], setup: Setup, watcher: Watcher) -> None:
        self.probes, self.watcher = probes, watcher
        self.folder = Path(tempfile.mkdtemp(dir=setup.scratch))
        self.world = setup.processes if probes[0].processes == "all" else 1
        job = {
            "setup": dataclasses.asdict(setup),
            "probes": [dataclasses.asdict(probe) for probe in probes],
            "events": str(self.folder / "events"),
        }
        (self.folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        self.events = [_Events(self.folder / f"events-{rank}") for rank in range(self.world)]
        self.hide_gpus = probes[0].processes == "cpu"

    def results(self) -> Iterator[list[Check]]:
        """Yield the checks of each probe; the last may be the one that ended the processes."""
        port = free_port()
        started = [self._start(rank, port) for rank in range(self.world)]
        try:
            for probe in self.probes:
                self.watcher.start(probe)
                checks, alive = self._follow(probe, started)
                yield checks
                if not alive:
                    return
        finally:
            for process in started:
                kill_tree(process)

    def _start(self, rank: int, port: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "vit_scale.doctor.child", str(self.folder / "job.json")]
        with (self.folder / f"log-{rank}").open("wb") as log:
            return subprocess.Popen(
                command,
                env=child_environment(rank, self.world, port, hide_gpus=self.hide_gpus),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _follow(self, probe: Probe, processes: list[subprocess.Popen]) -> tuple[list[Check], bool]:
        """Return the checks of the current probe, and whether the processes continue with the next."""
        deadline, stage = time.monotonic() + probe.timeout, ""
        while True:
            self.watcher.tick()
            ended = [process.poll() for process in processes]  # Before reading: what they wrote is then complete.
            for event in self.events[0]:
                if "stage" in event:
                    stage = event["stage"]
                    self.watcher.stage(stage)
                elif "end" in event:
                    return [Check(**check) for check in event["checks"]], True
            if any(ended) or all(status is not None for status in ended):
                return self._failure(probe, processes, stage), False
            if time.monotonic() > deadline:
                return [self._broken(probe, f"no result within {probe.timeout:.0f} s", stage)], False
            time.sleep(POLL_SECONDS)

    def _failure(self, probe: Probe, processes: list[subprocess.Popen], stage: str) -> list[Check]:
        """Describe the end of a process; what a rank reported itself explains most."""
        deadline = time.monotonic() + (GRACE_SECONDS if self.world > 1 else 0)
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(POLL_SECONDS)
        for events in self.events:
            for event in events:
                if "failed" in event:
                    return [Check(**check) for check in event["failed"]]
        rank, status = next((r, p.returncode) for r, p in enumerate(processes) if p.returncode is not None)
        for each, process in enumerate(processes):  # One that crashed rather than one that noticed it.
            if (process.returncode or 0) < 0:
                rank, status = each, process.returncode
        who = f"rank {rank} of {self.world}" if self.world > 1 else "the process"
        return [self._broken(probe, f"{who} {describe_status(status)}", stage, self.folder / f"log-{rank}")]

    def _broken(self, probe: Probe, what: str, stage: str, log: Path | None = None) -> Check:
        doing = f" while {stage}" if stage else ""
        tail = log.read_text(errors="replace")[-2000:] if log is not None else ""
        return broken(probe.name, what + doing, probe.advice, required=probe.required, output=tail)


class _Events:
    """Events that a rank has written and nobody has read yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        self.unread: deque[dict[str, Any]] = deque()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Read events one by one; those after the last one taken stay unread."""
        self._read()
        while self.unread:
            yield self.unread.popleft()

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.at)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self.at += len(complete)
        self.unread.extend(json.loads(line) for line in complete.splitlines())


def describe_status(status: int) -> str:
    """Describe how a process ended: `was killed by SIGILL (illegal instruction)`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"was killed by signal {-status}"
    meaning = signal.strsignal(number)
    return f"was killed by {number.name} ({(meaning or number.name).lower()})"


def child_environment(rank: int, world: int, port: int, *, hide_gpus: bool = False) -> dict[str, str]:
    """Return the variables of a rank: those of torchrun, or of a process started by hand if it is the only one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    if world > 1:
        kept |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        kept.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    # The same package as here, even if another one is installed.
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if hide_gpus:
        kept |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return kept


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def kill_tree(process: subprocess.Popen) -> None:
    """Kill a process and everything that it started."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.kill()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def count_gpus(watcher: Watcher, timeout: float = 120.0) -> int:
    """Return the GPUs that torch sees, asked in a child process: a driver may crash or hang."""
    code = "import torch; print(torch.cuda.device_count())"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    asked = subprocess.Popen([sys.executable, "-c", code], **pipes)
    deadline = time.monotonic() + timeout
    try:
        while asked.poll() is None and time.monotonic() < deadline:
            watcher.tick()
            time.sleep(POLL_SECONDS)
        return int(asked.communicate()[0].split()[-1]) if asked.returncode == 0 else 0
    finally:
        kill_tree(asked)
