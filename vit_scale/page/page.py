"""Puts the page together: one HTML file with everything in it, plotly's script and the pictures too."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from vit_scale.errors import UserError
from vit_scale.files import write_text
from vit_scale.format import date
from vit_scale.page import headline, options
from vit_scale.page.curves import AXES, curve_figure, first_smoothing, legend, panels_with_data
from vit_scale.page.metrics import MOST_POINTS
from vit_scale.page.next_commands import commands
from vit_scale.page.runs import PageRun
from vit_scale.page.tables import confusion_figure


@dataclass(frozen=True)
class Picture:
    """A picture of the run's folder and what the page says of it."""

    name: str
    title: str
    what: str


PICTURES = (
    Picture("batch", "What the model saw", "a training batch after augmentation and mixing"),
    Picture("attention", "Attention", "where the last block looks, on fixed validation images"),
    Picture("mistakes", "Worst mistakes", "validation images that the model was most wrong about"),
)


def write_page(runs: Sequence[PageRun], out: Path) -> None:
    """Write the page of `runs` to `out`; raises `UserError` where that cannot be done."""
    text = render_page(runs)
    try:
        write_text(out, text)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from error


def render_page(runs: Sequence[PageRun]) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    # Autoescape: class names, options and folder names come from elsewhere and may hold HTML.
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
        pictures=[picture for picture in PICTURES if any(picture.name in run.pictures for run in runs)],
        rows=rows,
        differing=options.differing(rows),
        changed=options.changed(rows),
        thinned=any(len(curve) > MOST_POINTS for run in runs for curve in run.metrics.curves.values()),
        most_points=MOST_POINTS,
        written=date(time.time()),
        data=_for_script(_figures(runs)),
        plotly=get_plotlyjs(),
        style=_asset("style.css"),
        script=_asset("page.js"),
    )


def _figures(runs: Sequence[PageRun]) -> dict[str, Any]:
    """Id of an element of the page -> the figure that is drawn there."""
    curves = {panel.title: curve_figure(panel, runs) for panels in panels_with_data(runs).values() for panel in panels}
    confusions = {f"confusion {i}": run.confusion for i, run in enumerate(runs) if run.confusion}
    matrices = {name: confusion_figure(confusion) for name, confusion in confusions.items() if confusion.counts}
    return {name: json.loads(figure.to_json()) for name, figure in (curves | matrices).items()}


def _for_script(value: Any) -> str:
    """JSON that can stand in a <script>: no `<` that could end it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("vit_scale.page") / "assets" / name).read_text(encoding="utf-8")
