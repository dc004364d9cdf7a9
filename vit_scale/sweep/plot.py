"""HTML page with the results of a sweep: the metric over trials and over each parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_scale.sweep.results import Result, show_value
from vit_scale.sweep.spec import Sweep

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLUMNS = 2
PANEL_HEIGHT = 340
COLORS = {"finished": "#1f6feb", "stopped early": "#9aa4b2"}


def write_plot(path: Path, results: Sequence[Result], sweep: Sweep) -> None:
    """Write a self-contained HTML page."""
    figure(results, sweep).write_html(path, include_plotlyjs=True)


def figure(results: Sequence[Result], sweep: Sweep) -> Figure:
    """Plot the metric over trials with the best so far, and over each varied parameter, in separate panels."""
    from plotly.subplots import make_subplots

    panels = ["trial", *sweep.varied]
    rows = math.ceil(len(panels) / COLUMNS)
    fig = make_subplots(rows=rows, cols=COLUMNS, vertical_spacing=0.3 / rows, horizontal_spacing=0.1)
    shown = [result for result in results if result.value is not None and result.state in COLORS]
    for place, panel in enumerate(panels):
        row, column = place // COLUMNS + 1, place % COLUMNS + 1
        for state in COLORS:
            points = [result for result in shown if result.state == state]
            fig.add_trace(_points(points, panel, state, legend=place == 0), row=row, col=column)
        where = sweep.parameters.get(panel)
        kind = "log" if where is not None and where.log else None
        fig.update_xaxes(title_text=panel, type=kind, exponentformat="e", row=row, col=column)
        fig.update_yaxes(title_text=sweep.metric.name, row=row, col=column)
    fig.add_trace(_best_so_far(shown, sweep.metric.goal), row=1, col=1)
    fig.update_layout(
        title=f"{sweep.path}: {len(shown)} trials", height=PANEL_HEIGHT * rows + 120, template="plotly_white"
    )
    return fig


def _points(results: Sequence[Result], panel: str, state: str, *, legend: bool) -> Any:
    from plotly.graph_objects import Scatter

    return Scatter(
        x=[result.number if panel == "trial" else _plain(result.values[panel]) for result in results],
        y=[result.value for result in results],
        mode="markers",
        marker={"color": COLORS[state], "size": 9, "symbol": "circle" if state == "finished" else "x-thin-open"},
        name=state,
        legendgroup=state,
        showlegend=legend,
        hovertext=[_hover(result) for result in results],
        hoverinfo="text",
    )


def _plain(value: Any) -> Any:
    """Return numbers unchanged; convert anything else to a category name."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _hover(result: Result) -> str:
    values = "<br>".join(f"{key} = {show_value(value)}" for key, value in result.values.items())
    return f"<b>{result.value:.4f}</b>, trial {result.number}<br>{values}"


def _best_so_far(results: Sequence[Result], goal: str) -> Any:
    from plotly.graph_objects import Scatter

    finished = sorted((r.number, r.value) for r in results if r.state == "finished" and r.value is not None)
    best = accumulate((value for _, value in finished), max if goal == "maximize" else min)
    line = {"color": "#d29922", "shape": "hv"}
    return Scatter(x=[number for number, _ in finished], y=list(best), mode="lines", line=line, name="best so far")
