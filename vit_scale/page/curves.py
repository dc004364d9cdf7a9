"""Plots of metrics.jsonl: which keys share a plot, how each is drawn, and the plotly figures.

The script of the page draws from these figures: it switches the horizontal axis, smooths, and hides runs. For that,
each trace carries in `meta` its run, its values on every axis and whether it may be smoothed.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from vit_scale.page.metrics import Metrics, downsample
from vit_scale.page.runs import PageRun
from vit_scale.tasks.results import Metric

if TYPE_CHECKING:
    import plotly.graph_objects as go

MIN_POINTS_TO_SMOOTH = 100
"""Longer curves are smoothed when the page opens."""
LOSS_PART = "train/loss_"


@dataclass(frozen=True)
class Curve:
    """One key of metrics.jsonl and how it is drawn; the color is that of the run."""

    key: str
    label: str = ""
    """Name in the legend of the plot; empty in a plot of one curve."""
    style: str = "noisy"
    """`noisy` may be smoothed; `exact` (a schedule), `points` and `ema` (evaluations) never are."""
    dash: str = ""
    """plotly's name of a dash pattern; empty for the one of the style."""


@dataclass(frozen=True)
class Panel:
    """One plot."""

    title: str
    curves: tuple[Curve, ...]
    format: str = ".4~g"
    """d3 format of a value in hover labels."""
    note: str = ""
    wide: bool = False
    from_zero: bool = False
    """Whether the vertical axis starts at zero."""

    @property
    def id(self) -> str:
        """Name of the plot that no other plot of the page has."""
        return self.curves[0].key


def _single(title: str, key: str, style: str = "noisy", **options: Any) -> Panel:
    return Panel(title, (Curve(key, style=style),), **options)


OPTIMIZATION = (
    _single("Learning rate", "train/lr", "exact", from_zero=True),
    _single("Weight decay", "train/weight_decay", "exact", from_zero=True),
    _single("Gradient norm", "train/grad_norm", from_zero=True),
    _single("Parameter norm", "train/param_norm"),
    _single("Update norm", "train/update_norm", from_zero=True),
)
PERFORMANCE = (
    _single("Images per second", "speed/images_per_second", format=",.4~r", from_zero=True),
    _single("Model FLOPs utilization", "speed/mfu", format=".1%", from_zero=True),
    _single("Waiting for data", "speed/data_wait", format=".1%", from_zero=True, note="fraction of the time"),
    _single("Device memory", "memory/device_gb", from_zero=True, note="GB"),
    _single("Process memory", "memory/process_gb", from_zero=True, note="GB"),
    _single("Skipped steps", "train/skipped_steps", "exact", from_zero=True, note="non-finite loss or gradient"),
)
AXES = {"step": "step", "epoch": "epoch", "images": "images seen", "time": "training time"}
_TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_LINES: dict[str, dict[str, Any]] = {
    "noisy": {"mode": "lines", "line": {"width": 1.6}},
    "exact": {"mode": "lines", "line": {"width": 1.8}},
    "points": {"mode": "lines+markers", "line": {"width": 2}, "marker": {"size": 6}},
    "ema": {
        "mode": "lines+markers",
        "line": {"width": 2, "dash": "dot"},
        "marker": {"size": 6, "symbol": "circle-open"},
    },
}
_DASHES = ("dash", "dashdot", "longdash")
"""Dash patterns of the parts of a loss."""


def panels_with_data(runs: Sequence[PageRun]) -> dict[str, list[Panel]]:
    """Return the plots of each group that have data; keys that no group names come last, one plot per key."""
    logged = dict.fromkeys(key for run in runs for key in run.metrics.curves)
    groups = {"Learning": (*_task_panels(runs, list(logged)), *OPTIMIZATION), "Performance": PERFORMANCE}
    named = {curve.key for panels in groups.values() for panel in panels for curve in panel.curves}
    groups["More"] = tuple(_single(key, key) for key in logged if key not in named)
    found = {
        title: [panel for panel in panels if any(curve.key in logged for curve in panel.curves)]
        for title, panels in groups.items()
    }
    return {title: panels for title, panels in found.items() if panels}


def _task_panels(runs: Sequence[PageRun], logged: list[str]) -> list[Panel]:
    """Return the loss with its parts, and one plot per metric of the tasks; the first two are large."""
    metrics: dict[str, Metric] = {}
    for metric in (metric for run in runs for metric in run.task.metrics if metric.name != "loss"):
        metrics.setdefault(metric.name, metric)
    parts = zip((key for key in logged if key.startswith(LOSS_PART)), cycle(_DASHES), strict=False)
    training = [Curve(key, f"training, {key.removeprefix(LOSS_PART)}", dash=dash) for key, dash in parts]
    loss = Panel("Loss", (Curve("train/loss", "training"), *training, *_evaluated("loss")), ".4f", wide=bool(metrics))
    return [
        loss,
        *(
            Panel(metric.heading, _evaluated(name), ".2%" if metric.percent else ".4f", wide=index == 0)
            for index, (name, metric) in enumerate(metrics.items())
        ),
    ]


def _evaluated(metric: str) -> tuple[Curve, Curve]:
    return Curve(f"val/{metric}", "validation", "points"), Curve(f"val_ema/{metric}", "validation, EMA", "ema")


def legend(panel: Panel, runs: Sequence[PageRun]) -> list[Curve]:
    """Return the curves that the legend of a plot names: labeled ones that some run has."""
    return [curve for curve in panel.curves if curve.label and any(curve.key in run.metrics.curves for run in runs)]


def curve_figure(panel: Panel, runs: Sequence[PageRun]) -> go.Figure:
    """Return one plot with every run that logged its keys."""
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
    if "%" in panel.format:  # a flat curve would be drawn in the middle of -90% to 110%
        figure.update_yaxes(tickformat=".3~%", autorangeoptions={"clipmin": 0, "clipmax": 1.03})
    return figure


def _name(panel: Panel, curve: Curve, run: PageRun | None) -> str:
    """Return the name of a curve in hover labels: its run if there are several, and its label."""
    parts = [run.name] if run else []
    return html.escape(", ".join([*parts, curve.label] if curve.label else parts or [panel.title]))


def _trace(curve: Curve, panel: Panel, run: PageRun, index: int, name: str, seconds_of_unit: float) -> go.Scatter:
    import plotly.graph_objects as go

    points = run.metrics.curves[curve.key]
    every_step = list(points)
    steps = [every_step[i] for i in downsample(list(points.values()))]
    positions = _positions(run.metrics, steps, seconds_of_unit)
    return go.Scatter(
        x=steps,
        y=[_short(points[step]) for step in steps],
        name=name,
        **_line(curve, run.color),
        hovertemplate=f"%{{y:{panel.format}}}",
        connectgaps=False,
        meta={"run": index, "key": curve.key, "smooth": curve.style == "noisy", "x": positions},
    )


def _line(curve: Curve, color: str) -> dict[str, Any]:
    """Return the plotly options of the line of a curve."""
    options = _LINES[curve.style]
    line = options["line"] | {"color": color} | ({"dash": curve.dash} if curve.dash else {})
    return options | {"line": line, "marker": options.get("marker", {}) | {"color": color}}


def _positions(metrics: Metrics, steps: Sequence[int], seconds_of_unit: float) -> dict[str, list[float | None]]:
    """Return the positions of steps on each axis besides `step`; axes unknown to the run are omitted."""
    places = {
        "epoch": metrics.epochs,
        "images": metrics.images,
        "time": {step: seconds / seconds_of_unit for step, seconds in metrics.seconds.items()},
    }
    return {axis: [_short(known.get(step)) for step in steps] for axis, known in places.items() if known}


def _short(value: float | None) -> float | None:
    """Round to seven digits: the precision of fp32, and half the page size."""
    return None if value is None else float(f"{value:.7g}")


def time_unit(runs: Sequence[PageRun]) -> tuple[str, float]:
    """Return a time unit that suits the longest run, and its length in seconds."""
    longest = max((max(run.metrics.seconds.values(), default=0.0) for run in runs), default=0.0)
    return next(((unit, size) for unit, size in _TIME_UNITS if longest >= 2 * size), _TIME_UNITS[-1])


def first_smoothing(runs: Sequence[PageRun]) -> float:
    """Return the initial smoothing: none for short curves."""
    longest = max((len(curve) for run in runs for curve in run.metrics.curves.values()), default=0)
    return 0.6 if longest > MIN_POINTS_TO_SMOOTH else 0.0
