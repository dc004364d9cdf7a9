"""Results of timm checks as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from vit_scale.cost.timm_check import TimmCheck
from vit_scale.format import giga
from vit_scale.record.terminal import make_console, make_table

SHOWN_DIFFERENCES = 10


def print_checks(checks: Sequence[TimmCheck]) -> None:
    """Print one line per model, then every difference by layer."""
    console = make_console()
    table = make_table("model", "timm model", "parameters", "stages", "GMACs", "result", gap=1)
    table.columns[1].justify = "left"
    for check in checks:
        numbers = (f"{check.params:,}", str(len(check.stages)), giga(check.macs)) if check.stages else ("", "", "")
        matched = "same name" if check.matched == check.model else check.matched or "none"
        table.add_row(check.model, matched, *numbers, _result(check))
    console.print(table)
    for check in checks:
        _print_reason(check, console)
    differing = sum(bool(check.differences) for check in checks)
    equal = sum(check.equal for check in checks)
    console.print(
        f"{equal} of {len(checks)} equal to timm in parameter names and shapes, output shapes per stage and MACs; "
        f"{differing} differ, {len(checks) - equal - differing} have no counterpart."
    )


def _result(check: TimmCheck) -> str:
    if check.differences:
        return "DIFFERS"
    return "no counterpart" if check.matched is None else check.reason or "equal"


def _print_reason(check: TimmCheck, console: Console) -> None:
    if check.matched is None:
        console.print(f"{check.model}: {check.reason}")
    if check.differences:
        console.print(Text(f"{check.model} differs from timm's {check.matched}:", style="bold red"))
        for line in check.differences[:SHOWN_DIFFERENCES]:
            console.print(f"  {line}", soft_wrap=True)
        if len(check.differences) > SHOWN_DIFFERENCES:
            console.print(f"  and {len(check.differences) - SHOWN_DIFFERENCES:,} more (list all with --format json)")


def checks_to_json(checks: Sequence[TimmCheck]) -> str:
    """Return a JSON list with one object per model."""
    return json.dumps([check.to_dict() for check in checks], indent=2)
