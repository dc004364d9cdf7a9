"""The most important numbers of a run: result, size, time, speed, hardware, and the check against timm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vit_scale.cost.strategy_names import LABELS
from vit_scale.format import amount, date, duration, percent
from vit_scale.page.metrics import SPEED
from vit_scale.page.recorded import is_number
from vit_scale.page.runs import PageRun


@dataclass(frozen=True)
class HeadlineStat:
    """A number of the headline."""

    label: str
    value: str
    detail: str = ""


def headline(run: PageRun) -> dict[str, HeadlineStat]:
    """Return the numbers of a run by column of the table of runs; unknown ones are omitted."""
    stats = {
        "best": _result(run),
        "parameters": _model(run),
        "time": _time(run),
        "images/s": _speed(run),
        "hardware": _hardware(run),
    }
    return {column: stat for column, stat in stats.items() if stat is not None}


def best_result(run: PageRun) -> tuple[float, int] | None:
    """Return the best value of the first metric, of raw or EMA weights, and its step; None before an evaluation."""
    if not run.task.metrics:
        return None
    metric = run.task.metrics[0]
    curves = [run.metrics.curves.get(f"{kind}/{metric.name}", {}) for kind in ("val", "val_ema")]
    results = [(value, step) for curve in curves for step, value in curve.items() if value is not None]
    if not results:
        return None
    best = metric.best_of([value for value, _ in results])
    return best, min(step for value, step in results if value == best)


def best_run(runs: Sequence[PageRun]) -> str:
    """Return the best result and its run, per task if there are several; empty if no run has been evaluated."""
    groups: dict[tuple[str, str], list[tuple[float, PageRun]]] = {}
    for run in runs:
        if result := best_result(run):
            groups.setdefault((run.task.name, run.task.metrics[0].name), []).append((result[0], run))
    return " · ".join(_best_of(results) for results in groups.values())


def _best_of(results: list[tuple[float, PageRun]]) -> str:
    metric = results[0][1].task.metrics[0]
    best = metric.best_of([value for value, _ in results])
    name = next(run.name for value, run in results if value == best)
    return f"Best {metric.heading}: {metric.text(best)} ({name})"


def status(run: PageRun) -> str:
    """Return `finished`, or the progress and the time of the last write."""
    if run.finished:
        return f"stopped early: {progress(run)}" if run.summary.get("stopped_early") else "finished"
    written = max(
        path.stat().st_mtime for path in (run.folder / "config.yaml", run.folder / "metrics.jsonl") if path.exists()
    )
    return f"not finished: {progress(run)}, last written {date(written)}"


def progress(run: PageRun) -> str:
    """Return `step 600/1,348`, or the epoch if the schedule is given in epochs."""
    metrics, steps, epochs = run.metrics, run.options.get("schedule.steps"), run.options.get("schedule.epochs")
    if not metrics.curves:
        return "nothing logged yet"
    if isinstance(steps, int):
        return f"step {metrics.last_step:,}/{steps:,}"
    epoch = max(metrics.epochs.values(), default=None)
    if epoch is not None and isinstance(epochs, int | float):
        return f"epoch {epoch:.1f}/{epochs:g}"
    return f"step {metrics.last_step:,}"


def _number(run: PageRun, key: str) -> float | None:
    """Return a number of the summary."""
    value = run.summary.get(key)
    return value if is_number(value) else None


def _result(run: PageRun) -> HeadlineStat | None:
    best = best_result(run)
    if best is None:
        return None
    metric = run.task.metrics[0]
    kinds = {"raw": run.metrics.last(f"val/{metric.name}"), "EMA": run.metrics.last(f"val_ema/{metric.name}")}
    last = ", ".join(f"{metric.text(value)} ({kind})" for kind, value in kinds.items() if value is not None)
    detail = f"best, at step {best[1]:,}; last {last or 'not finite'}"
    return HeadlineStat(metric.heading, metric.text(best[0]), detail)


def _model(run: PageRun) -> HeadlineStat | None:
    params, macs = _number(run, "params"), _number(run, "macs")
    if params is None:
        return None
    trained = _number(run, "params_trained")
    details = [f"{amount(trained)} trained"] if trained is not None and trained != params else []
    details += [f"{amount(macs)}MACs per image"] if macs else []
    return HeadlineStat("Parameters", amount(params), ", ".join(details))


def _time(run: PageRun) -> HeadlineStat | None:
    """`seconds` of the summary counts from the last launch; a resumed run has trained longer."""
    seconds = max(_number(run, "seconds") or 0.0, max(run.metrics.seconds.values(), default=0.0))
    if not seconds:
        return None
    epoch = max(run.metrics.epochs.values(), default=None)
    length = f"{run.metrics.last_step:,} steps" + (f", {epoch:.4g} epochs" if epoch else "")
    return HeadlineStat("Time", duration(seconds), length)


def _speed(run: PageRun) -> HeadlineStat | None:
    speed, mfu, peak = _median(run, SPEED), _median(run, "speed/mfu"), run.summary.get("peak_source")
    if speed is None:
        return None
    of_peak = f" (peak: {peak})" if peak else ""
    detail = f"median; MFU {percent(mfu)}{of_peak}" if mfu else "median"
    return HeadlineStat("Images per second", f"{speed:,.0f}", detail)


def _median(run: PageRun, key: str) -> float | None:
    values = [value for value in run.metrics.curves.get(key, {}).values() if value is not None]
    return statistics.median(values) if values else None


def _hardware(run: PageRun) -> HeadlineStat | None:
    processes = _number(run, "processes")
    if processes is None:
        return None
    strategy = LABELS.get(str(run.summary.get("strategy")))
    details = [strategy, run.summary.get("precision"), run.summary.get("device")]
    value = "1 process" if processes == 1 else f"{processes:,.0f} processes"
    return HeadlineStat("Hardware", value, ", ".join(str(detail) for detail in details if detail))


# -------------------------------------------------------------------------------------------- the check against timm


def timm_line(run: PageRun) -> str:
    """Return the result of the check against timm; empty if none was recorded."""
    check = run.summary.get("timm_check")
    if not isinstance(check, dict):
        return ""
    if not check.get("matched"):
        return f"not applicable: {check.get('reason', '')}"
    if differences := check.get("differences"):
        return f"failed: differs from timm's {check['matched']}: {differences[0]}"
    if check.get("reason"):
        return f"incomplete: timm's {check['matched']}: {check['reason']}"
    stages = f"{len(check.get('stages', {}))} stages"
    return f"passed: {check.get('tensors')} tensors, {stages} and MACs match timm's {check['matched']}"


def timm_stages(run: PageRun) -> list[tuple[str, str, str]]:
    """Return stage, our output shapes and timm's."""
    check = run.summary.get("timm_check")
    stages = check.get("stages") if isinstance(check, dict) else None
    if not isinstance(stages, dict):
        return []
    return [(name, _shapes(s.get("ours")), _shapes(s.get("timm"))) for name, s in stages.items() if isinstance(s, dict)]


def _shapes(shapes: Any) -> str:
    return ", ".join(" × ".join(map(str, shape)) for shape in shapes) if shapes else "none"
