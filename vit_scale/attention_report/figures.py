"""Plots of attention statistics, of one run or of several next to each other, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_scale.attention_report.measure import AttentionStatistics, BlockStatistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#3d7fe0", "#db6a1e", "#1f9a74", "#b65fd0")
Named = Sequence[tuple[str, AttentionStatistics]]
_MAX_NUMBERS = 6
"""Heads up to which a similarity matrix has its numbers."""


def statistics_figure(runs: Named) -> Figure:
    """Plot each statistic over the blocks: a dot per head, a line for the mean over heads; a color per run."""
    figure = _figure((12.0, 7.0))
    axes = figure.subplots(2, 3).ravel()
    with_prefix = any(stats.layout.prefix for _, stats in runs)
    panels = [
        ("Attention distance", "pixels", lambda block: block.distance),
        ("Entropy", "0: one token, 1: all equally", lambda block: block.entropy),
        ("Effective rank", "1: all queries agree", lambda block: block.rank),
        ("Similarity to other heads", "cosine, 1: equal", BlockStatistics.similarity_to_others),
    ]
    if with_prefix:
        panels.append(("Attention on prefix tokens", "fraction, of patches", lambda block: block.prefix))
    for place, (title, unit, read) in zip(axes, panels, strict=False):
        for number, (name, stats) in enumerate(runs):
            _draw_heads(place, stats, read, name, COLORS[number % len(COLORS)], number - (len(runs) - 1) / 2)
        place.set_title(title, loc="left", fontsize=11)
        place.set_ylabel(unit, fontsize=9)
        place.set_xlabel("block", fontsize=9)
        _clean(place)
    _draw_references(axes, runs, with_prefix)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    _name_runs(figure, axes, runs)
    return figure


def _draw_heads(place: Any, stats: AttentionStatistics, read: Any, name: str, color: str, shift: float) -> None:
    found = [(index, read(block)) for index, block in enumerate(stats.blocks)]
    known = [(index, np.asarray(values)) for index, values in found if values is not None]
    if not known:
        return
    # Heads and runs do not hide each other.
    width = 0.16 * shift
    for index, values in known:
        places = index + width + np.linspace(-0.06, 0.06, len(values)) if len(values) > 1 else [index + width]
        place.plot(places, values, "o", color=color, alpha=0.55, markersize=4, markeredgewidth=0)
    place.plot([i for i, _ in known], [v.mean() for _, v in known], color=color, linewidth=1.8, label=name)
    place.set_xticks([index for index, _ in known][:: max(1, len(known) // 12)])


def _draw_references(axes: Any, runs: Named, with_prefix: bool) -> None:
    """Draw what attention that is equal everywhere would have."""
    stats = runs[0][1]
    values = {0: stats.uniform_distance, 1: 1.0, 2: 1.0}
    if with_prefix:
        values[4] = stats.layout.prefix / stats.layout.tokens
    same = all(each.layout == stats.layout for _, each in runs)
    for panel, value in values.items() if same else ():
        axes[panel].axhline(value, color="#888888", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    # Nearly uniform attention must look like it, so small differences do not fill a plot.
    _widen(axes[0], 0.15 * stats.uniform_distance)
    _widen(axes[1], 0.1)
    _widen(axes[3], 0.1)
    for panel in (2, 4) if with_prefix else (2,):
        axes[panel].set_ylim(bottom=0)


def _widen(place: Any, least: float) -> None:
    """Extend the vertical axis downwards if it spans less than `least`."""
    low, high = place.get_ylim()
    place.set_ylim(min(low, max(0.0, high - least)), high)


def _name_runs(figure: Any, axes: Any, runs: Named) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=1.8) for i in range(len(runs))]
    names = [f"{name}: {stats.images:,} images" for name, stats in runs]
    handles += [
        Line2D([], [], color="#555555", linestyle="none", marker="o", markersize=4, markeredgewidth=0),
        Line2D([], [], color="#888888", linewidth=1, linestyle=(0, (4, 3))),
    ]
    names += ["one head (lines: mean over heads)", "uniform attention"]
    handle = {"handles": handles, "labels": names, "frameon": False, "fontsize": 9}
    figure.legend(**handle, loc="outside upper left", ncols=len(names))


def spectrum_figure(runs: Named) -> Figure | None:
    """Plot the singular values of each block, averaged over heads, over the largest one; None without a spectrum."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    shown = [(name, stats) for name, stats in runs if stats.spectrum_images]
    if not shown:
        return None
    figure = _figure((5.6 * len(shown) + 0.8, 4.2))
    axes = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    colors = colormaps["viridis"]
    for place, (name, stats) in zip(axes, shown, strict=True):
        last = max(1, len(stats.blocks) - 1)
        for index, block in enumerate(stats.blocks):
            assert block.spectrum is not None
            values = np.asarray(block.spectrum.mean(0))
            color = colors(0.92 * index / last)
            place.semilogy(np.arange(1, len(values) + 1), values / values[0], color=color, linewidth=1.5)
        place.set_ylim(1e-4, 1.2)
        count = f"{stats.spectrum_images:,} image{'s' if stats.spectrum_images > 1 else ''}"
        place.set_title(f"{name}: singular values ({count})", loc="left", fontsize=11)
        place.set_xlabel(f"number, of {stats.layout.tokens}", fontsize=9)
        _clean(place)
        bar = figure.colorbar(_mappable(Normalize(0, last / 0.92), colors), ax=place, fraction=0.05, pad=0.02)
        bar.ax.set_ylim(0, last)
        bar.set_label("block", fontsize=9)
    axes[0].set_ylabel("relative to the largest", fontsize=9)
    return figure


def _mappable(norm: Any, colors: Any) -> Any:
    from matplotlib.cm import ScalarMappable

    return ScalarMappable(norm, colors)


def similarity_figure(runs: Named) -> Figure | None:
    """Draw the similarity between the heads of each block, a row of matrices per run; None if all have one head."""
    if all(block.heads == 1 for _, stats in runs for block in stats.blocks):
        return None
    depth = max(len(stats.blocks) for _, stats in runs)
    columns = min(depth, 6)
    lines = -(-depth // columns)
    figure = _figure((1.75 * columns + 1.2, 1.95 * lines * len(runs) + 0.4))
    axes = figure.subplots(lines * len(runs), columns, squeeze=False)
    for place in axes.ravel():
        place.set_axis_off()
    image: Any = None
    for number, (name, stats) in enumerate(runs):
        for index, block in enumerate(stats.blocks):
            place = axes[number * lines + index // columns, index % columns]
            image = _draw_similarity(place, block)
            run = f"{name}, " if len(runs) > 1 and index % columns == 0 else ""
            place.set_title(f"{run}block {index}", fontsize=9, loc="left")
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    bar.set_label("cosine similarity of two heads", fontsize=9)
    return figure


def _draw_similarity(place: Any, block: BlockStatistics) -> Any:
    matrix = np.asarray(block.similarity)
    image = place.imshow(matrix, vmin=0, vmax=1, cmap="magma")
    if block.heads <= _MAX_NUMBERS:
        for row, column in np.ndindex(*matrix.shape):
            color = "black" if matrix[row, column] > 0.6 else "white"
            text = f"{matrix[row, column]:.2f}".replace("0.", ".")
            place.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
    return image


def _clean(place: Any) -> None:
    place.tick_params(labelsize=9)
    place.grid(axis="y", color="#eeeeee")
    for side in ("top", "right"):
        place.spines[side].set_visible(False)


def _figure(size: tuple[float, float]) -> Figure:
    """Create a figure without pyplot, which would keep it in a global list and look for a display."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")
