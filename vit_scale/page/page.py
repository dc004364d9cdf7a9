"""Render the page: one self-contained HTML file that includes its script and all images."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vit_scale.charts.figures import matrix_figure
from vit_scale.charts.html import render
from vit_scale.errors import UserError
from vit_scale.files import write_text
from vit_scale.format import date
from vit_scale.page import headline, options
from vit_scale.page.attention import block_figures, is_about_attention
from vit_scale.page.curves import AXES, curve_figure, describe, first_smoothing
from vit_scale.page.metrics import MAX_POINTS
from vit_scale.page.next_commands import commands
from vit_scale.page.panels import LOOKS, Group, groups_with_data, legend, missing, plots_per_row
from vit_scale.page.runs import PageRun
from vit_scale.page.tables import MAX_ROWS, is_drawn, largest_errors, numeric_columns
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
    rows, groups, blocks = options.option_rows(runs), groups_with_data(runs), block_figures(runs)
    images = by_name(runs, lambda run: {image.name: image for image in run.images})
    tables = by_name(runs, lambda run: {each.table.name: each for each in run.tables})
    return render(
        "vit_scale.page",
        "page.html",
        _figures(runs, groups) | {plot.id: figure for plot, figure in blocks.items()},
        runs=runs,
        headline=headline,
        commands=commands,
        groups=groups,
        looks=LOOKS,
        block_plots=list(zip(blocks, plots_per_row(len(blocks)), strict=True)),
        legend=legend,
        describe=describe,
        missing=missing,
        axes=AXES,
        smoothing=first_smoothing(runs),
        attention_images=[each for each in images if is_about_attention(each[2].name)],
        images=[each for each in images if not is_about_attention(each[2].name)],
        tables=[each for each in tables if not is_about_attention(each[2].table.name)],
        largest_errors=largest_errors,
        is_drawn=is_drawn,
        numeric_columns=numeric_columns,
        max_rows=MAX_ROWS,
        table_id=_table_id,
        rows=rows,
        differing=options.differing(rows),
        changed=options.changed(rows),
        downsampled=any(len(curve) > MAX_POINTS for run in runs for curve in run.metrics.curves.values()),
        max_points=MAX_POINTS,
        written=date(time.time()),
    )


def by_name(runs: Sequence[PageRun], read: Callable[[PageRun], dict[str, Any]]) -> list[tuple[int, PageRun, Any]]:
    """Return index, run and item of all runs, with items of the same name next to each other."""
    items = [read(run) for run in runs]
    names = dict.fromkeys(name for each in items for name in each)
    return [(i, runs[i], each[name]) for name in names for i, each in enumerate(items) if name in each]


def _figures(runs: Sequence[PageRun], groups: dict[str, Group]) -> dict[str, Any]:
    """Return the figures by the id of the element in which they are drawn."""
    curves = {panel.id: curve_figure(panel, runs) for group in groups.values() for panel in group.panels}
    tables = [(i, each.table) for i, run in enumerate(runs) for each in run.tables if is_drawn(each.table)]
    return curves | {_table_id(i, table): matrix_figure(table.columns, table.rows) for i, table in tables}


def _table_id(run: int, table: Table) -> str:
    return f"table {table.name} of run {run}"
