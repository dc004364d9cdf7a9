"""An evaluation for people, on the terminal and as files."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from vit_scale.format import percent
from vit_scale.record.terminal import make_console, make_table
from vit_scale.tasks.classify.calibration import BINS
from vit_scale.tasks.classify.evaluator import ClassResult, Evaluation

ALL_CLASSES = 20
"""Up to this many classes are all printed; of more, the weakest."""


def print_evaluation(evaluation: Evaluation, about: dict[str, str]) -> None:
    """What was evaluated, the figures, and a row for each class (the weakest, where there are many)."""
    console = make_console()
    calibration = evaluation.calibration
    rows = {
        **about,
        "top-1": f"{100 * evaluation.top1:.3f} %",
        "top-5": f"{100 * evaluation.top5:.3f} %",
        "loss": f"{evaluation.loss:.4f}",
        "calibration": f"error {100 * calibration.error:.2f} % (ECE, {BINS} bins): {calibration.note()}",
        "speed": f"{evaluation.images_per_second:,.1f} images/s, reading included",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        console.print(f"{name:<{width}}  {value}", soft_wrap=True)
    present = [row for row in evaluation.classes() if row.images]
    shown = present if len(present) <= ALL_CLASSES else sorted(present, key=lambda row: row.recall or 0)[:ALL_CLASSES]
    title = None if len(shown) == len(present) else f"the {len(shown)} weakest of {len(present):,} classes"
    console.print()
    console.print(_class_table(shown, title))


def _class_table(rows: Sequence[ClassResult], title: str | None) -> Any:
    table = make_table("class", "images", "accuracy", "precision", "mostly mistaken for", title=title)
    for row in rows:
        table.add_row(
            row.name, f"{row.images:,}", _percent(row.recall), _percent(row.precision), row.mistaken_for or ""
        )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else percent(share, 1)


def to_json(evaluation: Evaluation, about: dict[str, str]) -> str:
    """Everything but the pictures."""
    classes = [asdict(row) for row in evaluation.classes()]
    return json.dumps({**about, **evaluation.numbers(), "classes": classes}, indent=1) + "\n"


def write_files(evaluation: Evaluation, about: dict[str, str], folder: Path) -> list[str]:
    """metrics.json, classes.csv, confusion.csv, confusion.png and reliability.png; returns their names."""
    from vit_scale.tasks.classify.figures import confusion_figure, reliability_figure, save_figure

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(to_json(evaluation, about))
    names = evaluation.class_names
    _write_csv(
        folder / "classes.csv",
        [field.name for field in fields(ClassResult)],
        [list(asdict(row).values()) for row in evaluation.classes()],
    )
    counts = evaluation.confusion.tolist()
    _write_csv(
        folder / "confusion.csv",
        ["true \\ predicted", *names],
        [[n, *row] for n, row in zip(names, counts, strict=True)],
    )
    title = f"top-1 {100 * evaluation.top1:.2f} % of {evaluation.images:,} images"
    save_figure(confusion_figure(evaluation.confusion.numpy(), names, title), folder / "confusion.png")
    save_figure(reliability_figure(evaluation.calibration, title), folder / "reliability.png")
    return ["metrics.json", "classes.csv", "confusion.csv", "confusion.png", "reliability.png"]


def _write_csv(path: Path, heading: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([heading, *rows])
