"""Render the page: one self-contained HTML file that includes plotly's script and all images."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vit_scale.errors import UserError
from vit_scale.files import write_text
from vit_scale.format import date
from vit_scale.page import headline, options
from vit_scale.page.curves import AXES, curve_figure, first_smoothing, legend, panels_with_data
from vit_scale.page.metrics import MAX_POINTS
from vit_scale.page.next_commands import commands
from vit_scale.page.runs import PageRun
from vit_scale.page.tables import MAX_ROWS, largest_errors, matrix_figure, numeric_columns
from vit_scale.tasks.results import Table


def write_page(runs: Sequence[PageRun], out: Path) -> None:
    """Write the page of `runs` to `out`; raises `UserError` if that fails."""
    text = render_page(runs)
    try:
        write_text(out, text)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from error


def render_page(runs: Sequence[PageRun]) -> str:
    """Return the page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    # Autoescape: class names, options and directory names are foreign data and may contain HTML.
    environment = Environment(
        loader=PackageLoader("vit_scale.page", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = options.option_rows(runs)
    return environment.get_template("page.html").render(
        runs=runs,
        headline=headline,
        commands=commands,
        groups=panels_with_data(runs),
        legend=legend,
        axes=AXES,
        smoothing=first_smoothing(runs),
        images=by_name(runs, lambda run: {image.name: image for image in run.images}),
        tables=by_name(runs, lambda run: {each.table.name: each for each in run.tables}),
        largest_errors=largest_errors,
        numeric_columns=numeric_columns,
        max_rows=MAX_ROWS,
        table_id=_table_id,
        rows=rows,
        differing=options.differing(rows),
        changed=options.changed(rows),
        downsampled=any(len(curve) > MAX_POINTS for run in runs for curve in run.metrics.curves.values()),
        max_points=MAX_POINTS,
        written=date(time.time()),
        data=_for_script(_figures(runs)),
        plotly=get_plotlyjs(),
        style=_asset("style.css"),
        script=_asset("page.js"),
    )


def by_name(runs: Sequence[PageRun], read: Callable[[PageRun], dict[str, Any]]) -> list[tuple[int, PageRun, Any]]:
    """Return index, run and item of all runs, with items of the same name next to each other."""
    items = [read(run) for run in runs]
    names = dict.fromkeys(name for each in items for name in each)
    return [(i, runs[i], each[name]) for name in names for i, each in enumerate(items) if name in each]


def _figures(runs: Sequence[PageRun]) -> dict[str, Any]:
    """Return the figures by the id of the element in which they are drawn."""
    curves = {panel.id: curve_figure(panel, runs) for panels in panels_with_data(runs).values() for panel in panels}
    tables = [(i, each.table) for i, run in enumerate(runs) for each in run.tables]
    matrices = {_table_id(i, table): matrix_figure(table) for i, table in tables if table.matrix}
    return {name: json.loads(figure.to_json()) for name, figure in (curves | matrices).items()}


def _table_id(run: int, table: Table) -> str:
    return f"table {table.name} of run {run}"


def _for_script(value: Any) -> str:
    """Return JSON for a <script> element, without any `<` that could close it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("vit_scale.page") / "assets" / name).read_text(encoding="utf-8")
