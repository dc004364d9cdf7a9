"""The options of runs, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vit_scale.config import Config
from vit_scale.format import option_value
from vit_scale.page.runs import PageRun
from vit_scale.recipe import all_options, flatten

NOT_COMPARED = {"run.dir"}
"""Always another one in another run."""


@dataclass(frozen=True)
class OptionRow:
    """One option of all runs, as text."""

    key: str
    help: str
    values: list[str]
    default: str
    changed: list[bool]
    """For each run whether it differs from the default."""
    differs: bool
    """Whether the runs differ; one that does not have the option is taken to have the default."""


def option_rows(runs: Sequence[PageRun]) -> list[OptionRow]:
    """Every option that any run has, in the order of config.py."""
    defaults = flatten(Config())
    keys = dict.fromkeys([*defaults, *(key for run in runs for key in run.options)])
    return [_row(key, runs, defaults) for key in keys if any(key in run.options for run in runs)]


def _row(key: str, runs: Sequence[PageRun], defaults: dict[str, Any]) -> OptionRow:
    fields = all_options()
    effective = [run.options.get(key, defaults.get(key)) for run in runs]
    return OptionRow(
        key=key,
        help=fields[key].description if key in fields else "not an option of this version",
        values=[_text(run.options, key) for run in runs],
        default=_text(defaults, key),
        changed=[value != defaults.get(key) for value in effective],
        differs=any(value != effective[0] for value in effective),
    )


def _text(options: dict[str, Any], key: str) -> str:
    return option_value(options[key]) if key in options else "–"


def differing(rows: Sequence[OptionRow]) -> list[OptionRow]:
    """Those in which the runs differ from one another."""
    return [row for row in rows if row.differs and row.key not in NOT_COMPARED]


def changed(rows: Sequence[OptionRow]) -> list[OptionRow]:
    """Those in which some run differs from the defaults."""
    return [row for row in rows if any(row.changed) and row.key not in NOT_COMPARED]
