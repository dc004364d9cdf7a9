"""Plots of what a run logged over time: which keys share a plot, how each is drawn, and the plotly figures.

The page's script draws from these figures: it switches the horizontal axis, smooths and hides runs, for which each
trace carries its run, its values on every axis and whether it may be smoothed in `meta`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vit_scale.page.metrics import Metrics, thin
from vit_scale.page.runs import PageRun

if TYPE_CHECKING:
    import plotly.graph_objects as go

SMOOTHED_FROM = 100
"""Points from which a curve is smoothed when the page opens."""


@dataclass(frozen=True)
class Curve:
    """One key of metrics.jsonl and how it is drawn; the colour is the run's."""

    key: str
    label: str = ""
    """What the legend of its plot calls it; empty in a plot of one curve."""
    style: str = "noisy"
    """`noisy` may be smoothed, `exact` (a schedule) and `points` and `averaged` (evaluations) never are."""


@dataclass(frozen=True)
class Panel:
    """One plot."""

    title: str
    curves: tuple[Curve, ...]
    format: str = ".4~g"
    """d3's format of a value in hover labels."""
    note: str = ""
    wide: bool = False
    from_zero: bool = False
    """Whether the vertical axis starts at zero."""


def _evaluated(metric: str) -> tuple[Curve, Curve]:
    return Curve(f"val/{metric}", "validation", "points"), Curve(f"val_ema/{metric}", "validation, EMA", "averaged")


def _single(title: str, key: str, style: str = "noisy", **options: Any) -> Panel:
    return Panel(title, (Curve(key, style=style),), **options)


GROUPS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Loss", (Curve("train/loss", "training"), *_evaluated("loss")), ".4f", wide=True),
        Panel("Accuracy, top-1", _evaluated("top1"), ".2%", wide=True),
        Panel("Accuracy, top-5", _evaluated("top5"), ".2%"),
        _single("Learning rate", "train/lr", "exact", from_zero=True),
        _single("Weight decay", "train/weight_decay", "exact", from_zero=True),
        _single("Gradient norm", "train/grad_norm", from_zero=True),
        _single("Parameter norm", "train/param_norm"),
        _single("Update norm", "train/update_norm", from_zero=True),
    ),
    "How it ran": (
        _single("Images per second", "speed/images_per_second", format=",.4~r", from_zero=True),
        _single("Model FLOPs utilisation", "speed/mfu", format=".1%", from_zero=True),
        _single("Waiting for data", "speed/data_wait", format=".1%", from_zero=True, note="share of the time"),
        _single("Memory of the device", "memory/device_gb", from_zero=True, note="GB"),
        _single("Memory of the process", "memory/process_gb", from_zero=True, note="GB"),
        _single("Updates left out", "train/skipped_steps", "exact", from_zero=True, note="loss or gradient not finite"),
    ),
}
AXES = {"step": "step", "epoch": "epoch", "images": "images seen", "time": "training time"}
_TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_LINES: dict[str, dict[str, Any]] = {
    "noisy": {"mode": "lines", "line": {"width": 1.6}},
    "exact": {"mode": "lines", "line": {"width": 1.8}},
    "points": {"mode": "lines+markers", "line": {"width": 2}, "marker": {"size": 6}},
    "averaged": {
        "mode": "lines+markers",
        "line": {"width": 2, "dash": "dot"},
        "marker": {"size": 6, "symbol": "circle-open"},
    },
}


def panels_with_data(runs: Sequence[PageRun]) -> dict[str, list[Panel]]:
    """The plots of each group that have something to show; what no group names comes last, a plot a key."""
    logged = dict.fromkeys(key for run in runs for key in run.metrics.curves)
    named = {curve.key for panels in GROUPS.values() for panel in panels for curve in panel.curves}
    groups = GROUPS | {"More": tuple(_single(key, key) for key in logged if key not in named)}
    found = {
        title: [panel for panel in panels if any(curve.key in logged for curve in panel.curves)]
        for title, panels in groups.items()
    }
    return {title: panels for title, panels in found.items() if panels}


def legend(panel: Panel, runs: Sequence[PageRun]) -> list[Curve]:
    """The curves to be told apart in a plot, of those that some run has; none where there is only one kind."""
    return [curve for curve in panel.curves if curve.label and any(curve.key in run.metrics.curves for run in runs)]


def curve_figure(panel: Panel, runs: Sequence[PageRun]) -> go.Figure:
    """One plot of every run that logged its keys."""
    import plotly.graph_objects as go

    unit, seconds = time_unit(runs)
    figure = go.Figure(layout={"template": "none"})
    for index, run in enumerate(runs):
        for curve in panel.curves:
            if curve.key in run.metrics.curves:
                name = _name(panel, curve, run if len(runs) > 1 else None)
                figure.add_trace(_trace(curve, panel, run, index, name, seconds))
    titles = AXES | {"time": f"{AXES['time']} ({unit})"}
    figure.update_layout(meta={"axes": titles})
    figure.update_yaxes(rangemode="tozero" if panel.from_zero else "normal")
    if "%" in panel.format:  # a flat curve would be drawn in the middle of -90 % to 110 %
        figure.update_yaxes(tickformat=".3~%", autorangeoptions={"clipmin": 0, "clipmax": 1.03})
    return figure


def _name(panel: Panel, curve: Curve, run: PageRun | None) -> str:
    """What hovering calls a curve: its run where there are several, and what tells it from its neighbours."""
    parts = [run.name] if run else []
    return html.escape(", ".join([*parts, curve.label] if curve.label else parts or [panel.title]))


def _trace(curve: Curve, panel: Panel, run: PageRun, index: int, name: str, seconds_of_unit: float) -> go.Scatter:
    import plotly.graph_objects as go

    points = run.metrics.curves[curve.key]
    every_step = list(points)
    steps = [every_step[i] for i in thin(list(points.values()))]
    positions = _positions(run.metrics, steps, seconds_of_unit)
    return go.Scatter(
        x=steps,
        y=[_short(points[step]) for step in steps],
        name=name,
        **_LINES[curve.style],
        marker_color=run.color,
        line_color=run.color,
        hovertemplate=f"%{{y:{panel.format}}}",
        connectgaps=False,
        meta={"run": index, "key": curve.key, "smooth": curve.style == "noisy", "x": positions},
    )


def _positions(metrics: Metrics, steps: Sequence[int], seconds_of_unit: float) -> dict[str, list[float | None]]:
    """Where the steps stand on each axis besides `step`; an axis that the run does not know is left out."""
    places = {
        "epoch": metrics.epochs,
        "images": metrics.images,
        "time": {step: seconds / seconds_of_unit for step, seconds in metrics.seconds.items()},
    }
    return {axis: [_short(known.get(step)) for step in steps] for axis, known in places.items() if known}


def _short(value: float | None) -> float | None:
    """Seven digits: as much as fp32 has, and half the size of the page."""
    return None if value is None else float(f"{value:.7g}")


def time_unit(runs: Sequence[PageRun]) -> tuple[str, float]:
    """The unit in which the longest run has a handy length, and its seconds."""
    longest = max((max(run.metrics.seconds.values(), default=0.0) for run in runs), default=0.0)
    return next(((unit, size) for unit, size in _TIME_UNITS if longest >= 2 * size), _TIME_UNITS[-1])


def first_smoothing(runs: Sequence[PageRun]) -> float:
    """Long curves are smoothed when the page opens; short ones are shown as they are."""
    longest = max((len(curve) for run in runs for curve in run.metrics.curves.values()), default=0)
    return 0.6 if longest > SMOOTHED_FROM else 0.0
