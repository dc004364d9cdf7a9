"""Programs that a benchmark starts from the top of the repository, and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_program(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """The output of a program, with `environment` on top of this one; where it fails, what it said ends this one."""
    env = os.environ | dict(environment or {})
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def logged_rate(run_folder: Path, step: int) -> float:
    """Images per second that a run of ours logged at a step."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return next(line["speed/images_per_second"] for line in lines if line["step"] == step)
