"""The terminal, and the one kind of table that is printed there."""

from __future__ import annotations

import os

from rich import box
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 120


def make_console() -> Console:
    """Standard output; a pipe has PIPE_WIDTH columns unless COLUMNS says otherwise."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def make_table(*headings: str, title: str | None = None, gap: int = 2) -> Table:
    """A table without lines but the one below the headings; the first column is text, the others are numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
    )
    for i, heading in enumerate(headings):
        justify, overflow = ("right", "ellipsis") if i else ("left", "fold")
        table.add_column(heading, justify=justify, no_wrap=i > 0, overflow=overflow, vertical="bottom")  # type: ignore[arg-type]
    return table
