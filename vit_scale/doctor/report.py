"""The results: a table, a verdict, and a report in JSON for a bug report."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vit_scale.doctor.check import STATUSES, Check, Setup
from vit_scale.record.terminal import make_table
from vit_scale.record.versions import git_commit, versions

COLORS = {"works": "green", "slow": "yellow", "broken": "red", "skipped": "dim"}
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
"""Names of variables whose values appear in no report."""
SHORTEST_SECRET = 6
TRUSTED, BROKEN = 0, 1


def exit_status(checks: Sequence[Check]) -> int:
    """Return 0 if training here can be trusted: nothing that it relies on is broken."""
    return BROKEN if not checks or any(is_failure(check) for check in checks) else TRUSTED


def is_failure(check: Check) -> bool:
    """Return whether training relies on something that is broken."""
    return check.status == "broken" and check.required


def print_report(checks: Sequence[Check], console: Console) -> None:
    """Print a row per check, and what follows from them."""
    console.print(make_report_table(checks))
    console.print()
    for line in verdict(checks):
        console.print(line, soft_wrap=True)


def make_report_table(checks: Sequence[Check]) -> Table:
    """Return a row per check: what was measured, and below it what to do."""
    table = make_table("check", "status", "result")
    for column in table.columns[1:]:
        column.justify, column.no_wrap, column.overflow = "left", False, "fold"
    for column in table.columns:
        column.vertical = "top"
    table.columns[0].no_wrap = True
    for check in checks:
        result = f"{check.value}\n-> {check.advice}" if check.advice else check.value
        table.add_row(check.name, Text(check.status, style=COLORS[check.status]), Text(result))
    return table


def verdict(checks: Sequence[Check]) -> list[str]:
    """Return how many checks had each result, and whether training can be trusted."""
    counts = {status: sum(check.status == status for check in checks) for status in STATUSES}
    lines = [", ".join(f"{count} {status}" for status, count in counts.items() if count)]
    optional = [check.name for check in checks if check.status == "broken" and not check.required]
    if optional:
        lines.append(f"Broken, but training does not rely on it: {', '.join(optional)}.")
    failures = [check.name for check in checks if is_failure(check)]
    if failures:
        lines.append(f"Training cannot be trusted here until this is fixed: {', '.join(failures)}.")
    else:
        slow = counts["slow"]
        lines.append(
            "Training can be trusted here"
            + (f"; {slow} checks are slow." if slow > 1 else "; one check is slow." if slow else ".")
        )
    return lines


def to_json(checks: Sequence[Check], setup: Setup, *, seconds: float) -> str:
    """Return the report for a bug report, without secrets, user names and host names."""
    tree = {
        "versions": versions(),
        "git_commit": git_commit(),
        "platform": platform.platform(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "quick": setup.quick,
        "gpus": setup.gpus,
        "trusted": exit_status(checks) == TRUSTED,
        "checks": [asdict(check) for check in checks],
    }
    return json.dumps(_redacted(tree), indent=2, ensure_ascii=False)


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: _redacted(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(each) for each in value]
    # Not valid in JSON.
    return str(value) if isinstance(value, float) and not abs(value) < float("inf") else value


def redact(text: str) -> str:
    """Replace secrets of the environment, the home directory, the user and the host."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "***")
    text = text.replace(str(Path.home()), "~")
    for name in (_user(), socket.gethostname()):
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "***", text)
    return text


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):  # No such user in a container.
        return ""
