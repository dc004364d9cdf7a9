"""The curves of the plots: values, positions on every axis, and the learning rate between logged steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vit_scale.charts.figures import Series, line_figure
from vit_scale.page.metrics import Value, downsample, interpolate
from vit_scale.page.panels import Curve, Panel
from vit_scale.page.runs import PageRun
from vit_scale.page.schedule import LEARNING_RATE, scheduled_rates

MIN_POINTS_TO_SMOOTH = 100
"""Longer curves are smoothed when the page opens."""
AXES = {"step": "step", "epoch": "epoch", "images": "images seen", "time": "training time"}
_TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def curve_figure(panel: Panel, runs: Sequence[PageRun]) -> dict[str, Any]:
    """Return one plot with every run that logged its keys."""
    unit, seconds = time_unit(runs)
    series = [
        _series(curve, run, index, _name(panel, curve, run if len(runs) > 1 else None), seconds)
        for index, run in enumerate(runs)
        for curve in panel.curves
        if curve.key in run.metrics.curves
    ]
    known = {axis for each in series for axis in each.x}
    titles = {axis: f"{title} ({unit})" if axis == "time" else title for axis, title in AXES.items() if axis in known}
    return line_figure(series, titles, number_format=panel.format, from_zero=panel.from_zero)


def _name(panel: Panel, curve: Curve, run: PageRun | None) -> str:
    """Return the name of a curve in tooltips: its run if there are several, and its label."""
    parts = [run.name] if run else []
    return ", ".join([*parts, curve.label] if curve.label else parts or [panel.title])


def _series(curve: Curve, run: PageRun, index: int, name: str, seconds_of_unit: float) -> Series:
    points = _points(curve, run)
    every_step = list(points)
    steps = [every_step[i] for i in downsample(list(points.values()))]
    return Series(
        name=name,
        x=_positions(run, steps, seconds_of_unit),
        y=[_short(points[step]) for step in steps],
        color=run.color,
        style=curve.style if curve.style in ("points", "ema") else "line",
        dash=curve.dash,
        smooth=curve.style == "noisy",
        run=index,
        key=curve.key,
    )


def _points(curve: Curve, run: PageRun) -> dict[int, Value]:
    """Return the logged values; the learning rate also between logged steps, where warmup would be invisible."""
    logged = run.metrics.curves[curve.key]
    if curve.key != LEARNING_RATE:
        return logged
    both: dict[int, Value] = {**scheduled_rates(run), **logged}
    return {step: both[step] for step in sorted(both)}


def _positions(run: PageRun, steps: Sequence[int], seconds_of_unit: float) -> dict[str, list[float | None]]:
    """Return the positions of steps on each axis; axes unknown to the run are omitted."""
    metrics = run.metrics
    places = {
        "epoch": metrics.epochs,
        "images": metrics.images,
        "time": {step: seconds / seconds_of_unit for step, seconds in metrics.seconds.items()},
    }
    others = {axis: [_short(interpolate(known, step)) for step in steps] for axis, known in places.items() if known}
    return {"step": list(steps), **others}


def _short(value: float | None) -> float | None:
    """Round to seven digits: the precision of fp32, and half the page size."""
    return None if value is None else float(f"{value:.7g}")


def describe(panel: Panel, runs: Sequence[PageRun]) -> str:
    """Describe a plot for readers who cannot see it: the first and the last value of each curve."""
    parts = []
    for run in runs:
        for curve in panel.curves:
            values = [value for value in run.metrics.curves.get(curve.key, {}).values() if value is not None]
            if values:
                name = _name(panel, curve, run if len(runs) > 1 else None)
                parts.append(f"{name} from {panel.text(values[0])} to {panel.text(values[-1])}")
    return f"{panel.title}: {'; '.join(parts) or 'no finite values'}"


def time_unit(runs: Sequence[PageRun]) -> tuple[str, float]:
    """Return a time unit that suits the longest run, and its length in seconds."""
    longest = max((max(run.metrics.seconds.values(), default=0.0) for run in runs), default=0.0)
    return next(((unit, size) for unit, size in _TIME_UNITS if longest >= 2 * size), _TIME_UNITS[-1])


def first_smoothing(runs: Sequence[PageRun]) -> float:
    """Return the initial smoothing: none for short curves."""
    longest = max((len(curve) for run in runs for curve in run.metrics.curves.values()), default=0)
    return 0.6 if longest > MIN_POINTS_TO_SMOOTH else 0.0
