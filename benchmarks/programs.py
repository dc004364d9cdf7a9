"""Run programs from the repository root and read their results."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300


def run_program(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """Return the output of a program, run with additional environment variables; exit with its stderr if it fails."""
    env = os.environ | dict(environment or {})
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nexited with code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def time_until(command: list[str], seen: Callable[[], bool], stdout: int = subprocess.DEVNULL) -> float:
    """Return the seconds from starting a program until `seen()` is true; then kill it."""
    start = time.perf_counter()
    program = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=subprocess.DEVNULL)
    try:
        while not seen():
            if program.poll() is not None or time.perf_counter() - start > TIMEOUT_S:
                raise SystemExit(f"{' '.join(command)}: no step was logged (exit code {program.poll()})")
            time.sleep(0.01)
        return time.perf_counter() - start
    finally:
        program.kill()
        program.wait()


def logged(run_folder: Path, step: int) -> dict[str, float]:
    """Return the training metrics that a vit_scale run logged at `step`."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step and "train/loss" in line)


def logged_rate(run_folder: Path, step: int) -> float:
    """Return the images/s that a vit_scale run logged at `step`."""
    return logged(run_folder, step)["speed/images_per_second"]
