"""The options of one or more runs, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vit_scale.config import Config
from vit_scale.format import option_value
from vit_scale.page.runs import PageRun
from vit_scale.recipe import all_options, flatten

NOT_COMPARED = {"run.dir"}
"""Different in every run."""


@dataclass(frozen=True)
class OptionRow:
    """One option of all runs, as text."""

    key: str
    help: str
    values: list[str]
    default: str
    changed: list[bool]
    """Per run, whether the value differs from the default."""
    differs: bool
    """Whether the runs differ; a run without the option is treated as having the default."""


def option_rows(runs: Sequence[PageRun]) -> list[OptionRow]:
    """Return every option that any run has, in the order of config.py."""
    defaults = flatten(Config())
    keys = dict.fromkeys([*defaults, *(key for run in runs for key in run.options)])
    return [_row(key, runs, defaults) for key in keys if any(key in run.options for run in runs)]


def _row(key: str, runs: Sequence[PageRun], defaults: dict[str, Any]) -> OptionRow:
    fields = all_options()
    effective = [run.options.get(key, defaults.get(key)) for run in runs]
    return OptionRow(
        key=key,
        help=fields[key].description if key in fields else "not an option in this version",
        values=[_text(run.options, key) for run in runs],
        default=_text(defaults, key),
        changed=[value != defaults.get(key) for value in effective],
        differs=any(value != effective[0] for value in effective),
    )


def _text(options: dict[str, Any], key: str) -> str:
    return option_value(options[key]) if key in options else "–"


def differing(rows: Sequence[OptionRow]) -> list[OptionRow]:
    """Return the options in which the runs differ from one another."""
    return [row for row in rows if row.differs and row.key not in NOT_COMPARED]


def changed(rows: Sequence[OptionRow]) -> list[OptionRow]:
    """Return the options in which some run differs from the defaults."""
    return [row for row in rows if any(row.changed) and row.key not in NOT_COMPARED]
