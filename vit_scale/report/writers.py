"""Reports as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vit_scale.report.model_report import ModelReport
from vit_scale.report.overview import COMPUTE, MEMORY, MODEL, PARAMS, legend


def to_json(reports: Sequence[ModelReport]) -> str:
    """Return a JSON list with one object per model."""
    return json.dumps([report.to_dict() for report in reports], indent=2)


def to_csv(reports: Sequence[ModelReport]) -> str:
    """Return one CSV line per model; nested values have dotted names."""
    rows = [dict(_flatten(report.to_dict())) for report in reports]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def to_markdown(reports: Sequence[ModelReport]) -> str:
    """Return a Markdown table and its legend."""
    columns = [MODEL, PARAMS, *COMPUTE, *MEMORY]
    headings = [column.heading.replace("- ", "") for column in columns]
    lines = [_markdown_row(headings), _markdown_row(["---", *["---:"] * (len(columns) - 1)])]
    lines += [_markdown_row([" ".join(c.cell(report).split()) for c in columns]) for report in reports]
    return "\n".join([*lines, "", *(f"{line.strip()}  " for line in legend(reports))])


WRITERS = {"json": to_json, "csv": to_csv, "markdown": to_markdown}


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, "x".join(map(str, value)) if isinstance(value, list) else value
