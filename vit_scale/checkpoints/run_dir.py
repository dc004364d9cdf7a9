"""Files at the top of a run directory."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

from vit_scale.checkpoints import run_lock

UNUSED = "unused-"
"""Prefix of what a run no longer uses, such as checkpoints after the one it was rolled back to."""


def has_run(run_dir: Path) -> bool:
    """Return whether a run was started in `run_dir`."""
    return (run_dir / "config.yaml").exists()


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read summary.json; return an empty dict if it is missing or unreadable."""
    try:
        return json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return {}


def is_finished(run_dir: Path) -> bool:
    """Return whether the run has taken all its steps and written its final weights."""
    return bool(read_summary(run_dir).get("finished"))


def runs_of(recipe: str) -> list[Path]:
    """Return the directories in `runs` in which `recipe` was trained without `run.dir`, the latest first."""
    stem = Path(recipe).stem
    numbered = [path for path in Path("runs").glob(f"{glob.escape(stem)}-*") if path.name[len(stem) + 1 :].isdigit()]
    return sorted(filter(has_run, [Path("runs", stem), *numbered]), key=started_at, reverse=True)


def started_at(run_dir: Path) -> float:
    """Return when the last launch in `run_dir` started."""
    return (run_dir / "config.yaml").stat().st_mtime


def unused_path(path: Path) -> Path:
    """Return the first free name for something next to `path` that is not used any more: `unused-<name>`, ..."""
    number = 1
    while True:
        suffix = "" if number == 1 else f"-{number}"
        renamed = path.with_name(f"{UNUSED}{path.stem}{suffix}{path.suffix}")
        if not renamed.exists():
            return renamed
        number += 1


def rename_run_dir(run_dir: Path) -> Path:
    """Rename `run_dir` to the first free `<run_dir>.old-<n>` and return the new path."""
    run_lock.release(run_dir)
    number = 1
    while (renamed := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    run_dir.rename(renamed)
    return renamed
