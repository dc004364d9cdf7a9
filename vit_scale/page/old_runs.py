"""Runs of earlier versions, which trained classifiers only and did not record their task.

Their directories have `confusion.json` instead of `tables/`, and images without titles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TASK: dict[str, Any] = {
    "name": "classify",
    "metrics": [
        {"name": "top1", "label": "top-1", "title": "Top-1 accuracy"},
        {"name": "top5", "label": "top-5", "title": "Top-5 accuracy"},
        {"name": "loss", "label": "loss", "title": "Loss", "higher": False, "percent": False},
    ],
}
IMAGES = {
    "batch": {"title": "Training batch", "caption": "images as the model receives them, after augmentation and mixing"},
    "mistakes": {"title": "Misclassified images", "caption": "validation images with the highest loss"},
    "attention": {
        "title": "Attention",
        "caption": "attention maps of the last block, on fixed validation images",
    },
}


def is_shown(metric: str, classes: int) -> bool:
    """Return whether a metric whose run did not record it means something: top-5 of up to five classes is 100%."""
    return metric != "top5" or not 0 < classes <= 5


def read_confusion(path: Path) -> dict[str, Any]:
    """Convert a confusion.json to the content of a tables/NAME.json; empty if there is no valid one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        classes = [str(name) for name in content["classes"]]
        common = {"step": content["step"], "weights": content["weights"], "name": "confusion"}
        if "pairs" not in content:
            matrix = {"title": "Confusion matrix", "columns": classes, "rows": content["counts"], "matrix": True}
            return common | matrix
        rows = [[_class_name(i, classes), _class_name(j, classes), count] for i, j, count in content["pairs"]]
        rows.sort(key=lambda row: -row[2])
        return common | {"title": "Most frequent errors", "columns": ["true", "predicted", "images"], "rows": rows}
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return {}


def _class_name(index: Any, classes: list[str]) -> str:
    return classes[index] if isinstance(index, int) else str(index)
