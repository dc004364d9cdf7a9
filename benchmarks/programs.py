"""Programs that a benchmark starts from the top of the repository, and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS_AT_MOST = 300


def run_program(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """The output of a program, with `environment` on top of this one; where it fails, what it said ends this one."""
    env = os.environ | dict(environment or {})
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def time_until(command: list[str], seen: Callable[[], bool], stdout: int = subprocess.DEVNULL) -> float:
    """Seconds from starting a program to the moment when something is seen; then it is ended."""
    start = time.perf_counter()
    program = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=subprocess.DEVNULL)
    try:
        while not seen():
            if program.poll() is not None or time.perf_counter() - start > SECONDS_AT_MOST:
                raise SystemExit(f"{' '.join(command)}: no update was seen (status {program.poll()})")
            time.sleep(0.01)
        return time.perf_counter() - start
    finally:
        program.kill()
        program.wait()


def logged(run_folder: Path, step: int) -> dict[str, float]:
    """What a run of ours logged of its training at a step."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step and "train/loss" in line)


def logged_rate(run_folder: Path, step: int) -> float:
    """Images per second that a run of ours logged at a step."""
    return logged(run_folder, step)["speed/images_per_second"]
