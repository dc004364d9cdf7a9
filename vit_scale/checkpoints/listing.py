"""What is kept of a run: every checkpoint with its result, size, age and use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_scale.checkpoints.find import checkpoint_error, list_checkpoints, read_meta
from vit_scale.checkpoints.run_dir import UNUSED


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint of a run, valid or not."""

    name: str
    size: int
    """Bytes."""
    age: float
    """Seconds since it was written."""
    step: int | None = None
    """None, as the following, if it cannot be read."""
    epoch: float | None = None
    metrics: dict[str, float] | None = None
    """The evaluation after its step; None if there was none."""
    marks: tuple[str, ...] = ()
    """`latest`, `best`, `evaluation pending`, `unused`, or why it is invalid."""


def kept_checkpoints(run_dir: Path, checked: Callable[[], None] = lambda: None) -> list[KeptCheckpoint]:
    """Return all checkpoints of a run, those in use first; `checked` is called after each was verified."""
    directory = run_dir / "checkpoints"
    used = list_checkpoints(directory)
    found = []
    for path in [*used, *sorted(directory.glob(f"{UNUSED}step-*"))]:
        found.append((path, checkpoint_error(path)))
        checked()
    found = [(path, error) for path, error in found if path.is_dir()]  # A run in progress may have removed some.
    valid = [path for path, error in found if error is None and path in used]
    latest = valid[-1] if valid else None
    best_step = read_meta(latest)["best_step"] if latest is not None else 0
    return [_describe(path, error, path == latest, best_step) for path, error in found]


def _describe(path: Path, error: str | None, is_latest: bool, best_step: int) -> KeptCheckpoint:
    files = [file.stat() for file in path.iterdir() if file.is_file()]
    written = (path / "manifest.json").stat().st_mtime if (path / "manifest.json").exists() else path.stat().st_mtime
    size, age = sum(stat.st_size for stat in files), max(0.0, time.time() - written)
    unused = ["unused"] if path.name.startswith(UNUSED) else []
    if error is not None:
        return KeptCheckpoint(path.name, size, age, marks=(*unused, f"invalid: {error}"))
    meta = read_meta(path)
    marks = {
        "latest": is_latest,
        "best": not unused and bool(best_step) and meta["step"] == best_step,
        "evaluation pending": not meta["evaluated"],
    }
    chosen = (*unused, *(mark for mark, applies in marks.items() if applies))
    return KeptCheckpoint(path.name, size, age, meta["step"], _epoch(meta), meta.get("metrics"), chosen)


def _epoch(meta: dict[str, Any]) -> float | None:
    plan = meta["plan"]
    images = plan.get("train_images")
    return meta["step"] * plan["global_batch"] / images if images else None
