"""Which keys of metrics.jsonl share a plot, in which group; values that never change are listed instead of plotted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from vit_scale.attention_report.names import DISTANCE, ENTROPY
from vit_scale.format import percent
from vit_scale.page.runs import PageRun
from vit_scale.tasks.results import Metric

COLUMNS = 12
"""Columns of the grid of plots; a row has up to three plots."""
LOSS_PART = "train/loss_"
LOOKS = "Where it looks"
_ATTENTION_KEY = re.compile(rf"val(?:_ema)?/(?:{DISTANCE}|{ENTROPY})_block(\d+)")
_BLOCK_DASHES = ("2 3", "7 3", "")
"""Dash patterns of the first, the middle and the last block."""
_EMA_DASH = "2 3"
_PART_DASHES = ("6 3", "6 2 1 2", "11 3")
"""Dash patterns of the parts of a loss."""


@dataclass(frozen=True)
class Curve:
    """One key of metrics.jsonl and how it is drawn; the color is that of the run."""

    key: str
    label: str = ""
    """Name in the legend of the plot; empty in a plot of one curve."""
    style: str = "noisy"
    """`noisy` may be smoothed; `exact` (a schedule), `points` and `ema` (evaluations) never are."""
    dash: str = ""
    """SVG's dash pattern."""


@dataclass(frozen=True)
class Panel:
    """One plot."""

    title: str
    curves: tuple[Curve, ...]
    format: str = "number"
    """`number`, `fixed` or `percent`, as in charts.figures."""
    unit: str = ""
    note: str = ""
    wide: bool = False
    from_zero: bool = False
    """Whether the vertical axis starts at zero."""
    steady: float | None = 0.0
    """Values within this fraction of their maximum are listed, not plotted; None: always plotted."""
    min_points: int = 1
    """Curves of fewer values are plotted even if they are steady."""

    @property
    def id(self) -> str:
        """Name of the plot that no other plot of the page has."""
        return self.curves[0].key

    def text(self, value: float) -> str:
        """Format a value."""
        if self.format == "percent":
            return percent(value)
        if self.format == "fixed":
            return f"{value:.4f}"
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:,.4g}"


@dataclass(frozen=True)
class Constant:
    """A value that never changes in any run."""

    title: str
    unit: str
    values: list[tuple[int | None, str]]
    """Index of a run and its value; the index is None if all runs have the same value."""


@dataclass(frozen=True)
class Group:
    """Plots below one heading, and the values that need no plot."""

    panels: list[Panel]
    constants: list[Constant]

    def spans(self) -> list[int]:
        """Return the columns that each plot takes, so that all rows are full."""
        wide = sum(panel.wide for panel in self.panels)
        narrow = plots_per_row(len(self.panels) - wide)
        return [COLUMNS // min(2, wide) if panel.wide else COLUMNS // next(narrow) for panel in self.panels]


def plots_per_row(count: int) -> Any:
    """Yield for each of `count` plots how many share its row: rows of three, then of two."""
    pairs = {0: 0, 1: 2, 2: 1}[count % 3] if count > 1 else 0
    threes = (count - 2 * pairs) // 3
    yield from [3] * (3 * threes) + [2] * (2 * pairs) + [1] * (count == 1)


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
    _single("Images per second", "speed/images_per_second", from_zero=True),
    _single("Model FLOPs utilization", "speed/mfu", format="percent", from_zero=True),
    _single("MFU of the teacher", "speed/mfu_teacher", format="percent", from_zero=True, note="included in the MFU"),
    _single("Waiting for data", "speed/data_wait", format="percent", from_zero=True, unit="of the time"),
    _single("Device memory", "memory/device_gb", from_zero=True, unit="GB", steady=0.02),
    _single("Process memory", "memory/process_gb", from_zero=True, unit="GB", steady=0.02),
    _single("Skipped steps", "train/skipped_steps", "exact", from_zero=True, note="non-finite loss or gradient"),
)


def groups_with_data(runs: Sequence[PageRun]) -> dict[str, Group]:
    """Return the groups that have data; keys that no group names come last, one plot per key."""
    logged = dict.fromkeys(key for run in runs for key in run.metrics.curves)
    panels = {"Learning": (*_task_panels(runs, list(logged)), *OPTIMIZATION), "Performance": PERFORMANCE}
    panels[LOOKS] = _attention_panels(list(logged))
    named = {curve.key for group in panels.values() for panel in group for curve in panel.curves} | _hidden_keys(runs)
    named |= {key for key in logged if _ATTENTION_KEY.fullmatch(key)}
    panels["More"] = tuple(_single(key, key) for key in logged if key not in named)
    groups = {title: _group(found, runs) for title, found in panels.items()}
    return {title: group for title, group in groups.items() if group.panels or group.constants}


def _hidden_keys(runs: Sequence[PageRun]) -> set[str]:
    """Return the keys of metrics that mean nothing for the data of these runs."""
    hidden = [metric for run in runs for metric in run.task.metrics if not metric.shown]
    return {curve.key for metric in hidden for curve in _evaluated(metric.name)}


def _group(panels: Sequence[Panel], runs: Sequence[PageRun]) -> Group:
    found = Group([], [])
    for panel in panels:
        if not any(curve.key in run.metrics.curves for run in runs for curve in panel.curves):
            continue
        constant = _constant(panel, runs)
        if constant is None:
            found.panels.append(panel)
        else:
            found.constants.append(constant)
    return found


def _constant(panel: Panel, runs: Sequence[PageRun]) -> Constant | None:
    if panel.steady is None:
        return None
    values: list[tuple[int | None, str]] = []
    for index, run in enumerate(runs):
        curves = [run.metrics.curves[curve.key] for curve in panel.curves if curve.key in run.metrics.curves]
        if not curves:
            continue
        logged = [value for curve in curves for value in curve.values() if value is not None]
        if min(map(len, curves)) < panel.min_points:
            return None
        if logged and (
            len(logged) < sum(map(len, curves)) or max(logged) - min(logged) > panel.steady * max(map(abs, logged))
        ):
            return None
        values.append((index, panel.text(logged[-1]) if logged else "not finite"))
    same = len({text for _, text in values}) == 1 and len(values) == len(runs)
    return Constant(panel.title, panel.unit, [(None, values[0][1])] if same else values)


def _task_panels(runs: Sequence[PageRun], logged: list[str]) -> list[Panel]:
    """Return the loss with its parts, and one plot per metric of the tasks; the first two are large."""
    metrics: dict[str, Metric] = {}
    for metric in (metric for run in runs for metric in run.task.metrics if metric.name != "loss" and metric.shown):
        metrics.setdefault(metric.name, metric)
    parts = zip((key for key in logged if key.startswith(LOSS_PART)), cycle(_PART_DASHES), strict=False)
    training = [Curve(key, f"training, {key.removeprefix(LOSS_PART)}", dash=dash) for key, dash in parts]
    curves = (Curve("train/loss", "training"), *training, *_evaluated("loss"))
    return [
        Panel("Loss", curves, "fixed", wide=True, steady=None),
        *(
            Panel(
                metric.heading,
                _evaluated(name),
                "percent" if metric.percent else "fixed",
                wide=index == 0,
                steady=None if index == 0 else 0.0,
                min_points=2,
            )
            for index, (name, metric) in enumerate(metrics.items())
        ),
    ]


def _attention_panels(logged: Sequence[str]) -> tuple[Panel, ...]:
    """Return distance and entropy over training, of the first, the middle and the last block that were logged."""
    blocks = sorted({int(found[1]) for key in logged if (found := _ATTENTION_KEY.fullmatch(key))})
    if not blocks:
        return ()
    chosen = list(dict.fromkeys((blocks[0], blocks[len(blocks) // 2], blocks[-1])))
    dashes = _BLOCK_DASHES[-len(chosen) :]

    def curves(name: str) -> tuple[Curve, ...]:
        return tuple(
            Curve(f"{section}/{name}_block{block}", f"block {block}", style, dash)
            for section, style in (("val", "points"), ("val_ema", "ema"))
            for block, dash in zip(chosen, dashes, strict=True)
        )

    return (
        Panel("Attention distance over training", curves(DISTANCE), unit="pixels", steady=None),
        Panel("Entropy over training", curves(ENTROPY), unit="0 to 1", steady=None),
    )


def _evaluated(metric: str) -> tuple[Curve, Curve]:
    return (
        Curve(f"val/{metric}", "validation", "points"),
        Curve(f"val_ema/{metric}", "validation, EMA", "ema", _EMA_DASH),
    )


def legend(panel: Panel, runs: Sequence[PageRun]) -> list[Curve]:
    """Return the curves that the legend of a plot names: labeled ones that some run has."""
    return [curve for curve in panel.curves if curve.label and any(curve.key in run.metrics.curves for run in runs)]


def missing(panel: Panel, runs: Sequence[PageRun]) -> int:
    """Return how many logged values of a plot are not finite, which it shows as gaps."""
    curves = (run.metrics.curves.get(curve.key, {}) for run in runs for curve in panel.curves)
    return sum(value is None for curve in curves for value in curve.values())
