"""Figures of results, drawn with matplotlib: confusion matrix, reliability diagram, attention over an image."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vit_scale.format import percent
from vit_scale.tasks.classify.calibration import Calibration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBERS_UP_TO = 20
"""Classes up to which cells carry their numbers."""
_NAMES_UP_TO = 100
"""Classes up to which every class is named."""
_TICKS = 20
_CIRCLED = 10
_INK = "#1a1a2e"


def confusion_figure(confusion: np.ndarray, class_names: Sequence[str], title: str) -> Figure:
    """Rows are true classes, columns predictions, colors fractions of a row; legible from 2 to 1,000 classes.

    Cells of few classes have their counts, up to a hundred classes have their names. Beyond that the worst errors are
    circled and labeled, because a cell is only a pixel or two. Colors follow square roots, so that small fractions are
    visible.
    """
    classes = len(class_names)
    inches = float(np.clip(3.5 + 0.28 * classes, 5, 14))
    figure, axes = _figure((inches + 1.2, inches))
    fractions = confusion / np.maximum(1, confusion.sum(1, keepdims=True))
    image = axes.imshow(np.sqrt(fractions), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    _name_axes(axes, class_names, inches)
    if classes <= _NUMBERS_UP_TO:
        _write_counts(axes, confusion, fractions)
    elif classes > _NAMES_UP_TO:
        _circle_worst(axes, confusion, fractions, class_names)
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_title(title, loc="left", fontsize=11)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    levels = np.array([0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0])
    bar.set_ticks(np.sqrt(levels).tolist(), labels=[f"{100 * level:g}%" for level in levels])
    bar.set_label("fraction of the images of the true class")
    return figure


def _name_axes(axes: Any, class_names: Sequence[str], inches: float) -> None:
    classes = len(class_names)
    if classes <= _NAMES_UP_TO:
        places, size = np.arange(classes), float(np.clip(60 * inches / 14 / classes * 10, 4.5, 9))
        labels = [name if len(name) <= 22 else f"{name[:21]}…" for name in class_names]
    else:
        places, size = np.linspace(0, classes - 1, _TICKS).round().astype(int), 8.0
        labels = [f"{place} {class_names[place]}"[:22] for place in places]
    upright = max(map(len, labels)) > 2
    axes.set_xticks(places, labels=labels, fontsize=size, rotation=90 if upright else 0)
    axes.set_yticks(places, labels=labels, fontsize=size)
    axes.tick_params(length=2)


def _write_counts(axes: Any, confusion: np.ndarray, fractions: np.ndarray) -> None:
    size = 9 if len(confusion) <= 12 else 6.5
    for row, column in np.argwhere(confusion):
        color = "white" if fractions[row, column] > 0.35 else _INK
        axes.text(column, row, f"{confusion[row, column]:,}", ha="center", va="center", fontsize=size, color=color)


def _circle_worst(axes: Any, confusion: np.ndarray, fractions: np.ndarray, class_names: Sequence[str]) -> None:
    errors = np.where(np.eye(len(confusion), dtype=bool), 0, fractions)
    for row, column in zip(*np.unravel_index(np.argsort(-errors, axis=None)[:_CIRCLED], errors.shape), strict=True):
        if not errors[row, column]:
            break
        axes.plot(column, row, "o", markersize=9, markerfacecolor="none", markeredgecolor="#d1495b")
        on_the_left = column > 0.7 * len(confusion)
        label = f"{class_names[row]} confused with {class_names[column]}, {100 * fractions[row, column]:.0f}%"
        axes.annotate(
            label,
            (column, row),
            xytext=(-8 if on_the_left else 8, 0),
            textcoords="offset points",
            ha="right" if on_the_left else "left",
            va="center",
            fontsize=7,
            color="#d1495b",
        )


def reliability_figure(calibration: Calibration, title: str) -> Figure:
    """Plot accuracy over confidence per bin with the diagonal of a calibrated model, and the bin sizes below."""
    figure, (axes, below) = _figure((5.5, 6), rows=2, height_ratios=(3, 1), sharex=True)
    counts, hits = np.array(calibration.counts, float), np.array(calibration.hits, float)
    edges = np.linspace(0, 1, len(counts) + 1)
    used = counts > 0
    accuracy = np.divide(hits, counts, out=np.zeros_like(hits), where=used)
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1, label="calibrated")
    width = edges[1]
    axes.bar(edges[:-1][used], accuracy[used], width=width, align="edge", color="#4c78a8", edgecolor="white")
    axes.set(ylabel="accuracy", ylim=(0, 1), xlim=(0, 1))
    axes.set_title(f"{title}\nexpected calibration error {percent(calibration.error)}", loc="left", fontsize=11)
    axes.legend(loc="upper left", frameon=False)
    below.bar(
        edges[:-1], counts / max(1.0, counts.sum()), width=width, align="edge", color="#9aa5b1", edgecolor="white"
    )
    below.set(xlabel="confidence", ylabel="fraction of images")
    return figure


def attention_figure(pixels_HWC: np.ndarray, attention_HW: np.ndarray, title: str) -> Figure:
    """Plot an image next to the same image under its attention map, with the scale of the map."""
    figure, (left, right) = _figure((7.9, 3.9), columns=2)
    shown = pixels_HWC[:, :, 0] if pixels_HWC.shape[2] == 1 else pixels_HWC
    height, width = pixels_HWC.shape[:2]
    for axes in (left, right):
        axes.imshow(shown, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.set_axis_off()
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    heat = right.imshow(100 * attention_HW, cmap="inferno", alpha=0.55, extent=extent, interpolation="bilinear")
    bar = figure.colorbar(heat, ax=right, fraction=0.046, pad=0.03, format="%.3g%%")
    bar.set_label(f"attention per patch (average {100 / attention_HW.size:.3g}%)", fontsize=9)
    figure.suptitle(title, x=0.02, ha="left", fontsize=10)
    return figure


def save_figure(figure: Figure, path: Path | IO[bytes]) -> None:
    """Write a PNG."""
    figure.savefig(path, format="png", dpi=150, facecolor="white")


def to_image(figure: Figure) -> Image.Image:
    """Render a figure."""
    file = io.BytesIO()
    save_figure(figure, file)
    return Image.open(file)


def _figure(size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Create a figure without pyplot, which would keep it in a global list and look for a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)
