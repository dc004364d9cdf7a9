"""`launch/train.py RECIPE --list-checkpoints`: what is kept of a run, and how to roll it back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vit_scale.checkpoints.listing import KeptCheckpoint, kept_checkpoints
from vit_scale.checkpoints.run_dir import read_summary
from vit_scale.format import duration, memory_size, percent
from vit_scale.launcher import is_main_process
from vit_scale.page.runs import find_folders
from vit_scale.record.terminal import Terminal, make_console, make_table


def list_checkpoints(target: str, overrides: Sequence[str] = ()) -> int:
    """Print the checkpoints of the latest run of a recipe, or of a run directory; the run may be in progress."""
    if not is_main_process():
        return 0
    (run_dir,) = find_folders([target], overrides)
    with Terminal(enabled=True, stderr=True).phase("Verifying checkpoints") as phase:
        kept = kept_checkpoints(run_dir, checked=phase.advance)
    console = make_console()
    if not kept:
        console.print(f"{run_dir}: no checkpoints yet", soft_wrap=True)
        return 0
    console.print(_table(kept, run_dir))
    used = [each for each in kept if each.step is not None and "unused" not in each.marks]
    if len(used) > 1:
        console.print(f"Roll back with run.resume={used[0].name} (what came after is kept aside).", soft_wrap=True)
    return 0


def _table(kept: Sequence[KeptCheckpoint], run_dir: Path) -> Any:
    metric = _metric(run_dir)
    columns = [f"val/{metric['name']}", f"val_ema/{metric['name']}"]
    shown = [key for key in columns if any(key in (each.metrics or {}) for each in kept)]
    labels = {columns[0]: metric["label"], columns[1]: f"EMA {metric['label']}"}
    table = make_table(f"checkpoints of {run_dir}", "step", "epoch", *(labels[key] for key in shown), "size", "age", "")
    table.columns[-1].justify = "left"
    for each in kept:
        values = [(each.metrics or {}).get(key) for key in shown]
        table.add_row(
            each.name,
            "" if each.step is None else f"{each.step:,}",
            "" if each.epoch is None else f"{each.epoch:.4g}",
            *("" if value is None else _format(metric, value) for value in values),
            memory_size(each.size),
            duration(each.age),
            ", ".join(each.marks),
        )
    return table


def _metric(run_dir: Path) -> dict[str, Any]:
    """Return the first metric of the run's task, as recorded."""
    metrics = (read_summary(run_dir).get("task") or {}).get("metrics") or [{"name": "top1", "label": "top-1"}]
    return metrics[0]


def _format(metric: dict[str, Any], value: float) -> str:
    return percent(value) if metric.get("percent", True) else f"{value:.4f}"
