"""Files at the top of a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vit_scale.checkpoints import run_lock


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


def rename_run_dir(run_dir: Path) -> Path:
    """Rename `run_dir` to the first free `<run_dir>.old-<n>` and return the new path."""
    run_lock.release(run_dir)
    number = 1
    while (renamed := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    run_dir.rename(renamed)
    return renamed
