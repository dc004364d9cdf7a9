"""The section "Where it looks": plots over the blocks and pictures of maps; curves over training are in panels.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vit_scale.attention_report.names import PICTURE, TABLE
from vit_scale.charts.figures import Series, line_figure
from vit_scale.page.recorded import PageTable
from vit_scale.page.runs import PageRun


@dataclass(frozen=True)
class BlockPlot:
    """A statistic over the blocks: a point per head and a line for their mean."""

    column: str
    title: str
    unit: str
    from_zero: bool = False

    @property
    def id(self) -> str:
        """Name of the plot that no other plot of the page has."""
        return f"table {TABLE}: {self.column}"


BLOCK_PLOTS = (
    BlockPlot("distance", "Attention distance", "pixels; a point per head"),
    BlockPlot("entropy", "Entropy", "0: one token, 1: all equally"),
    BlockPlot("effective_rank", "Effective rank", "of the attention matrix", from_zero=True),
    BlockPlot("similarity", "Similarity to other heads", "cosine, 1: equal"),
    BlockPlot("prefix_share", "Attention on prefix tokens", "fraction, of patches", from_zero=True),
)


def statistics_of(run: PageRun) -> PageTable | None:
    """Return the table of attention statistics of a run, if it has a valid one."""
    found = [each for each in run.tables if each.table.name == TABLE]
    return found[0] if found and {"block", "head"} <= set(found[0].table.columns) else None


def block_figures(runs: Sequence[PageRun]) -> dict[BlockPlot, dict[str, Any]]:
    """Return the figures over the blocks that have values other than zero, of all runs."""
    found = {}
    for plot in BLOCK_PLOTS:
        series = [each for number, run in enumerate(runs) for each in _series(plot, run, number, len(runs) > 1)]
        if any(value for each in series for value in each.y):
            found[plot] = line_figure(series, {"block": "block"}, from_zero=plot.from_zero, by_point=True)
    return found


def _series(plot: BlockPlot, run: PageRun, number: int, several: bool) -> list[Series]:
    values = _values(plot, statistics_of(run))
    if not values:
        return []
    name = [run.name] if several else []
    points = [(block, head, value) for block, heads in values.items() for head, value in heads.items()]
    means = {block: fmean(heads.values()) for block, heads in values.items()}
    common: dict[str, Any] = {"color": run.color, "run": number}
    return [
        Series(
            name=run.name,
            x={"block": [float(block) for block, _, _ in points]},
            y=[value for _, _, value in points],
            style="scatter",
            texts=[[*name, f"block {block}, head {head}", f"{value:.3g}"] for block, head, value in points],
            **common,
        ),
        Series(
            name=run.name,
            x={"block": [float(block) for block in means]},
            y=list(means.values()),
            texts=[[*name, f"block {block}, mean of heads", f"{mean:.3g}"] for block, mean in means.items()],
            **common,
        ),
    ]


def _values(plot: BlockPlot, recorded: PageTable | None) -> dict[int, dict[int, float]]:
    """Return the values of each block by head; empty if the table lacks them."""
    if recorded is None or plot.column not in recorded.table.columns:
        return {}
    places = [recorded.table.columns.index(name) for name in ("block", "head", plot.column)]
    found: dict[int, dict[int, float]] = {}
    for row in recorded.table.rows:
        block, head, value = (row[place] for place in places)
        if isinstance(value, int | float) and isinstance(block, int) and isinstance(head, int):
            found.setdefault(block, {})[head] = float(value)
    return dict(sorted(found.items()))


def is_about_attention(name: str) -> bool:
    """Return whether an image or table of this name belongs to this section."""
    return name in (TABLE, PICTURE, "attention")
