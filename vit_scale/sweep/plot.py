"""HTML page with the results of a sweep: the ranked trials, and the metric over trials and over each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from vit_scale.charts.figures import COLORS, Series, line_figure
from vit_scale.charts.html import render
from vit_scale.files import write_text
from vit_scale.sweep.results import Result, show_value
from vit_scale.sweep.spec import Sweep

STATES = {"finished": COLORS[0], "stopped early": "#8b95a5"}
_BEST = COLORS[1]


def write_plot(path: Path, results: Sequence[Result], sweep: Sweep) -> None:
    """Write a self-contained HTML page; `results` are ranked, the best first."""
    panels = ["trial", *sweep.varied]
    page = render(
        "vit_scale.sweep",
        "sweep.html",
        {panel: panel_figure(panel, results, sweep) for panel in panels},
        sweep=sweep,
        panels=panels,
        results=results,
        counts={state: sum(result.state == state for result in results) for state in STATES},
        states=STATES,
        best_color=_BEST,
        show_value=show_value,
        is_numeric={key: all(_is_number(each.values.get(key)) for each in results) for key in sweep.varied},
    )
    write_text(path, page)


def panel_figure(panel: str, results: Sequence[Result], sweep: Sweep) -> dict[str, Any]:
    """Plot the metric over the trials, with the best so far, or over one parameter."""
    shown = [result for result in results if result.value is not None and result.state in STATES]
    values: dict[int, Any] = {r.number: r.number if panel == "trial" else r.values.get(panel) for r in shown}
    categories = None if all(map(_is_number, values.values())) else _categories(list(values.values()))
    series = [_best_so_far(shown, sweep.metric.goal)] if panel == "trial" else []
    for state, color in STATES.items():
        points = [result for result in shown if result.state == state]
        places = [values[result.number] for result in points]
        x: list[float | None] = places
        if categories is not None:
            x = [categories.index(show_value(place)) for place in places]
        texts = [_describe(result, sweep) for result in points]
        y = [result.value for result in points]
        series.append(Series(state, {panel: x}, y, color, "scatter", texts=texts))
    parameter = sweep.parameters.get(panel)
    log = parameter is not None and parameter.log and all(_is_number(v) and v > 0 for v in values.values())
    return line_figure(series, {panel: panel}, log_x=log, categories=categories, by_point=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _categories(values: Sequence[Any]) -> list[str]:
    """Return the distinct values as text: numbers ascending, then the rest in the order of the alphabet."""
    distinct = {show_value(value): value for value in values}
    return sorted(
        distinct,
        key=lambda text: (not _is_number(distinct[text]), distinct[text] if _is_number(distinct[text]) else 0, text),
    )


def _describe(result: Result, sweep: Sweep) -> list[str]:
    """Return the lines of a point's tooltip."""
    values = [f"{key} = {show_value(value)}" for key, value in result.values.items()]
    return [f"{sweep.metric.name} {result.value:.4f}", f"trial {result.number}, {result.state}", *values]


def _best_so_far(results: Sequence[Result], goal: str) -> Series:
    finished = sorted((r for r in results if r.state == "finished"), key=lambda r: r.number)
    best = list(accumulate(finished, lambda first, second: _better(first, second, goal)))
    texts = [[f"best so far {each.value:.4f}", f"trial {each.number}"] for each in best]
    numbers: list[float | None] = [result.number for result in finished]
    last = max((result.number for result in results), default=0)
    if best and last > finished[-1].number:  # trials that were stopped early come after the last finished one
        numbers, best, texts = [*numbers, last], [*best, best[-1]], [*texts, texts[-1]]
    return Series("best so far", {"trial": numbers}, [each.value for each in best], _BEST, "stairs", texts=texts)


def _better(first: Result, second: Result, goal: str) -> Result:
    assert first.value is not None
    assert second.value is not None
    better = second.value > first.value if goal == "maximize" else second.value < first.value
    return second if better else first
