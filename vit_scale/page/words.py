"""Numbers, values and dates for the people who read the page."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from vit_scale.report.figures import significant
from vit_scale.train import screen


def amount(count: float) -> str:
    """`202 k`, `86.6 M`, `1.01 G`; small numbers as they are."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= factor:
            return f"{significant(count / factor, 3)} {unit}"
    return f"{count:,.0f}"


def percent(fraction: float) -> str:
    """`98.89 %`, never broken between lines."""
    return screen.percent(fraction).replace(" ", "\N{NO-BREAK SPACE}")


def option_value(value: Any) -> str:
    """An option as it is typed on a command line: `null`, `true`, `0.0003`, `[0.8, 1.0]`."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False)


def date(timestamp: float) -> str:
    """`16 November 2026, 06:45`, in the local time zone."""
    moment = datetime.fromtimestamp(timestamp).astimezone()
    return f"{moment.day} {moment:%B %Y, %H:%M}"
