"""Which classes are taken for which: the confusion matrix, or its largest entries where there are many classes."""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_scale.format import percent

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_PAIRS = 12
NUMBERS_UP_TO = 20
"""Classes up to which every cell has room for its number."""


@dataclass(frozen=True)
class Confusion:
    """A confusion.json. Rows are true classes, columns predicted ones."""

    step: int
    weights: str
    classes: list[str]
    counts: list[list[int]]
    """Empty where there are too many classes for a matrix."""
    pairs: list[tuple[str, str, int]]
    """True class, predicted class, how often: the most frequent mistakes first."""


def read_confusion(path: Path) -> Confusion | None:
    """The file, or None where there is none that makes sense."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        classes = [str(name) for name in data["classes"]]
        counts = _square(data.get("counts", []), len(classes))
        pairs = _pairs(data["pairs"], classes) if "pairs" in data else _mistakes(counts, classes)
        return Confusion(int(data["step"]), str(data["weights"]), classes, counts, pairs[:MOST_PAIRS])
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return None


def _square(counts: list[list[Any]], size: int) -> list[list[int]]:
    if counts and (len(counts) != size or any(len(row) != size for row in counts)):
        raise ValueError("one row and one column for each class")
    return [[int(count) for count in row] for row in counts]


def _pairs(pairs: list[list[Any]], classes: list[str]) -> list[tuple[str, str, int]]:
    named = [(_name(true, classes), _name(predicted, classes), int(count)) for true, predicted, count in pairs]
    return sorted(named, key=lambda pair: -pair[2])


def _name(index: Any, classes: list[str]) -> str:
    return classes[index] if isinstance(index, int) else str(index)


def _mistakes(counts: list[list[int]], classes: list[str]) -> list[tuple[str, str, int]]:
    triples = [(i, j, count) for i, row in enumerate(counts) for j, count in enumerate(row) if i != j and count]
    return _pairs([list(triple) for triple in triples], classes)


def confusion_figure(confusion: Confusion) -> go.Figure:
    """The matrix as a heat map of shares of the true class; mistakes are below zero, for a colour of their own."""
    import plotly.graph_objects as go

    classes, counts = [html.escape(name) for name in confusion.classes], confusion.counts
    few = len(classes) <= NUMBERS_UP_TO
    heat = go.Heatmap(
        z=[[_shade(count / max(1, sum(row)), i == j) for j, count in enumerate(row)] for i, row in enumerate(counts)],
        customdata=counts,
        hovertext=_in_words(classes, counts),
        hovertemplate="%{hovertext}<extra></extra>",
        text=[[f"{count:,}" if count else "" for count in row] for row in counts] if few else None,
        texttemplate="%{text}" if few else None,
        zmin=-1,
        zmax=1,
        xgap=1 if few else 0,
        ygap=1 if few else 0,
        showscale=False,
    )
    figure = go.Figure(heat, layout={"template": "none"})
    ticks = {"tickvals": list(range(len(classes))), "ticktext": classes} if few else {"showticklabels": False}
    figure.update_xaxes(title_text="predicted", constrain="domain", ticks="", **ticks)
    figure.update_yaxes(title_text="true", autorange="reversed", scaleanchor="x", constrain="domain", ticks="", **ticks)
    return figure


def _shade(share: float, right: bool) -> float:
    """The root makes a mistake that happens once in a hundred visible."""
    return share if right else -math.sqrt(share)


def _in_words(classes: list[str], counts: list[list[int]]) -> list[list[str]]:
    """`2 of 37 (5.4 %): 9 taken for 1`, for every cell."""
    return [
        [
            f"{count:,} of {sum(row):,} ({percent(count / max(1, sum(row)))}): {true} "
            + ("recognised" if i == j else f"taken for {classes[j]}")
            for j, count in enumerate(row)
        ]
        for i, (true, row) in enumerate(zip(classes, counts, strict=True))
    ]
