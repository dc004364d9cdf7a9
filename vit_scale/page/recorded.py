"""What the task of a run recorded in the run directory: its metrics, images and tables. The page imports no task."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit_scale.page import old_runs
from vit_scale.page.embedded import image_url
from vit_scale.tasks.results import Metric, Table


@dataclass(frozen=True)
class PageTask:
    """The task of a run."""

    name: str
    metrics: tuple[Metric, ...]
    """The first one decides which result is best."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the result depends on besides the options."""


@dataclass(frozen=True)
class PageImage:
    """An image of the run directory."""

    name: str
    title: str
    caption: str
    url: str
    """The image as a data URL."""
    width: int | None
    """Pixels; None if the file is not a readable image."""


@dataclass(frozen=True)
class PageTable:
    """A table of the run directory, and the step and weights that it was made with."""

    table: Table
    step: int
    weights: str


def as_mapping(value: Any) -> dict[str, Any]:
    """Return `value` if it is a mapping, otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def is_number(value: Any) -> bool:
    """Return whether `value` is an int or float; JSON's booleans are ints in Python."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_task(summary: dict[str, Any]) -> PageTask:
    """Return the task that summary.json describes; classification if it was written by an earlier version."""
    task = as_mapping(summary.get("task")) or old_runs.TASK
    metrics = task.get("metrics")
    classes = summary.get("class_names")
    count = len(classes) if isinstance(classes, list) else 0
    found = [_metric(as_mapping(entry), count) for entry in metrics] if isinstance(metrics, list) else []
    known = tuple(metric for metric in found if metric is not None)
    return PageTask(str(task.get("name", "")), known, as_mapping(task.get("facts")))


def _metric(entry: dict[str, Any], classes: int) -> Metric | None:
    if not isinstance(entry.get("name"), str):
        return None
    flags = {name: bool(entry[name]) for name in ("higher", "percent", "brief", "shown") if name in entry}
    flags.setdefault("shown", old_runs.is_shown(entry["name"], classes))
    label = str(entry.get("label") or entry["name"])
    return Metric(entry["name"], label, title=str(entry.get("title") or ""), **flags)


def read_images(folder: Path, summary: dict[str, Any]) -> list[PageImage]:
    """Return all images of a run, in the order in which they were first recorded."""
    described = as_mapping(summary.get("pictures") if "task" in summary else old_runs.IMAGES)
    files = {path.stem: path for path in sorted((folder / "pictures").glob("*.png"))}
    names = [name for name in described if name in files]
    names += [name for name in files if name not in described]
    return [image for name in names if (image := _image(name, files[name], as_mapping(described.get(name))))]


def _image(name: str, path: Path, about: dict[str, Any]) -> PageImage | None:
    try:
        url, width = image_url(path.read_bytes())
    except OSError:
        return None
    parts = [str(about["caption"])] if about.get("caption") else []
    if is_number(about.get("step")):
        parts.append(f"step {about['step']:,}")
    return PageImage(name, str(about.get("title") or name), ", ".join(parts), url, width)


def read_tables(folder: Path, summary: dict[str, Any]) -> list[PageTable]:
    """Return all valid tables of a run."""
    if "task" not in summary:
        found = [_table(old_runs.read_confusion(folder / "confusion.json"))]
    else:
        found = [_table(_read_json(path)) for path in sorted((folder / "tables").glob("*.json"))]
    return [table for table in found if table is not None]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return as_mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _table(content: dict[str, Any]) -> PageTable | None:
    """Return the table of a tables/NAME.json, or None if it is malformed."""
    try:
        table = Table(
            str(content["name"]),
            str(content["title"]),
            [str(name) for name in content["columns"]],
            [list(row) for row in content["rows"]],
            matrix=bool(content.get("matrix")),
            percent=[str(name) for name in content.get("percent", [])],
        )
        found = PageTable(table, int(content["step"]), str(content["weights"]))
    except (KeyError, TypeError, ValueError):
        return None
    return found if _is_valid(table) else None


def _is_valid(table: Table) -> bool:
    if any(len(row) != len(table.columns) for row in table.rows):
        return False
    if not table.matrix:
        return True
    cells = [cell for row in table.rows for cell in row]
    counts = all(is_number(cell) and math.isfinite(cell) and cell >= 0 for cell in cells)
    return len(table.rows) == len(table.columns) and counts
