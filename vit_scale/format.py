"""Numbers, sizes, durations and dates as text. Every message, table and page formats them here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any


def significant(value: float, digits: int = 4) -> str:
    """Format `value` with `digits` significant digits and no exponent: 0.3646, 17.56, 1,784."""
    if value == 0:
        return "0"
    whole_digits = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    return f"{value:,.{max(0, digits - whole_digits)}f}"


def giga(value: float) -> str:
    """Format in units of 1e9: 17,563,828,224 is 17.56."""
    return significant(value / 1e9)


def amount(count: float) -> str:
    """`202 k`, `86.6 M`, `1.01 G`; small numbers unchanged."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= factor:
            return f"{significant(count / factor, 3)} {unit}"
    return f"{count:,.0f}"


def percent(fraction: float, digits: int = 2) -> str:
    """Format a fraction of 1: 0.9889 is `98.89%`."""
    return f"{100 * fraction:.{digits}f}%"


def duration(seconds: float) -> str:
    """`48s`, `3m 05s`, `2h 05m`."""
    minutes, secs = divmod(round(seconds), 60)
    hours, mins = divmod(minutes, 60)
    return f"{hours}h {mins:02d}m" if hours else f"{mins}m {secs:02d}s" if mins else f"{secs}s"


def long_duration(seconds: float) -> str:
    """`9h 20m`; in days from two days on: `2.31 days`."""
    days = seconds / 86400
    return f"{significant(days, 3)} days" if days >= 2 else duration(seconds)


def format_steps(count: int) -> str:
    """`1 step`, `1,000 steps`."""
    return f"{count:,} step{'' if count == 1 else 's'}"


def memory_size(size: float) -> str:
    """Format bytes with their unit: 1.2 GiB, 35 MiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{significant(size / factor, 3)} {unit}"
    return f"{size:,.0f} B"


def image_size(size: tuple[int, int]) -> str:
    """Height x width in pixels."""
    return f"{size[0]} x {size[1]}"


def option_value(value: Any) -> str:
    """Format an option as it is typed on a command line: `null`, `true`, `0.0003`, `[0.8, 1.0]`."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False)


def printable(text: str) -> str:
    """Return a file name as one line of text: line breaks and bytes that are not text are escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 image` or `1,200 images`; `plural`: if it is not the noun with an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"


def some(names: Sequence[str], shown: int = 3) -> str:
    """Return the first names and the number of others: `a, b, c and 7 more`."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(map(printable, names[:shown])) + more


def date(timestamp: float) -> str:
    """`16 November 2026, 06:45`, in the local time zone."""
    moment = datetime.fromtimestamp(timestamp).astimezone()
    return f"{moment.day} {moment:%B %Y, %H:%M}"
