"""A run in words and figures: result, size, time, speed, hardware, and the check against timm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vit_scale.cost.strategy_names import LABELS
from vit_scale.format import amount, date, duration, percent
from vit_scale.page.metrics import SPEED
from vit_scale.page.runs import PageRun


@dataclass(frozen=True)
class Fact:
    """A figure of the headline with what it is and what else is to be known of it."""

    label: str
    value: str
    detail: str = ""


def headline(run: PageRun) -> list[Fact]:
    """The figures that are looked for first; what is not known is left out."""
    facts = [_result(run), _model(run), _time(run), _speed(run), _hardware(run)]
    return [fact for fact in facts if fact is not None]


def by_label(run: PageRun) -> dict[str, Fact]:
    """The same, for a table in which every run has the same columns."""
    return {fact.label: fact for fact in headline(run)}


def best_result(run: PageRun) -> tuple[float, int] | None:
    """The best top-1 accuracy of raw or averaged weights and its step; None before the first evaluation."""
    curves = [run.metrics.curves.get(key, {}) for key in ("val/top1", "val_ema/top1")]
    results = [(value, -step) for curve in curves for step, value in curve.items() if value is not None]
    value, step = max(results, default=(None, 0))
    return None if value is None else (value, -step)


def best_run(runs: Sequence[PageRun]) -> str:
    """Which of several runs has the best result, in words; empty where none was evaluated yet."""
    results = {run.name: result[0] for run in runs if (result := best_result(run))}
    best = max(results, key=lambda name: results[name], default=None)
    return f"best top-1 accuracy: {percent(results[best])} in {best}" if best else ""


def status(run: PageRun) -> str:
    """`finished`, or how far it has come and when it was last heard of."""
    if run.finished:
        return "finished"
    written = max(
        path.stat().st_mtime for path in (run.folder / "config.yaml", run.folder / "metrics.jsonl") if path.exists()
    )
    return f"not finished: {progress(run)}, last heard of {date(written)}"


def progress(run: PageRun) -> str:
    """`step 600 of 1,348`, or the epoch where the length is given in epochs."""
    metrics, steps, epochs = run.metrics, run.options.get("schedule.steps"), run.options.get("schedule.epochs")
    if not metrics.curves:
        return "nothing logged yet"
    if isinstance(steps, int):
        return f"step {metrics.last_step:,} of {steps:,}"
    epoch = max(metrics.epochs.values(), default=None)
    if epoch is not None and isinstance(epochs, int | float):
        return f"epoch {epoch:.1f} of {epochs:g}"
    return f"step {metrics.last_step:,}"


def _number(run: PageRun, key: str) -> float | None:
    """A figure of the summary."""
    value = run.summary.get(key)
    return value if isinstance(value, int | float) else None


def _result(run: PageRun) -> Fact | None:
    best = best_result(run)
    if best is None:
        return None
    kinds = {"raw": run.metrics.last("val/top1"), "EMA": run.metrics.last("val_ema/top1")}
    last = ", ".join(f"{percent(value)} {kind}" for kind, value in kinds.items() if value is not None)
    return Fact("Top-1 accuracy", percent(best[0]), f"best, after {best[1]:,} steps; last {last or 'not a number'}")


def _model(run: PageRun) -> Fact | None:
    params, macs = _number(run, "params"), _number(run, "macs")
    if params is None:
        return None
    return Fact("Parameters", amount(params), f"{amount(macs)}MACs a forward pass of one image" if macs else "")


def _time(run: PageRun) -> Fact | None:
    """`seconds` of the summary are those since the last start: after a resume the time spent training is longer."""
    seconds = max(_number(run, "seconds") or 0.0, max(run.metrics.seconds.values(), default=0.0))
    if not seconds:
        return None
    epoch = max(run.metrics.epochs.values(), default=None)
    length = f"{run.metrics.last_step:,} steps" + (f", {epoch:.4g} epochs" if epoch else "")
    return Fact("Time", duration(seconds), length)


def _speed(run: PageRun) -> Fact | None:
    speed, mfu, peak = _median(run, SPEED), _median(run, "speed/mfu"), run.summary.get("peak_source")
    if speed is None:
        return None
    of_peak = f" of {peak}" if peak else ""
    return Fact("Images per second", f"{speed:,.0f}", f"median; MFU {percent(mfu)}{of_peak}" if mfu else "median")


def _median(run: PageRun, key: str) -> float | None:
    values = [value for value in run.metrics.curves.get(key, {}).values() if value is not None]
    return statistics.median(values) if values else None


def _hardware(run: PageRun) -> Fact | None:
    processes = _number(run, "processes")
    if processes is None:
        return None
    strategy = LABELS.get(str(run.summary.get("strategy")))
    told = [strategy, run.summary.get("precision"), run.summary.get("device")]
    value = "1 process" if processes == 1 else f"{processes:,.0f} processes"
    return Fact("Ran on", value, ", ".join(str(part) for part in told if part))


# -------------------------------------------------------------------------------------------- the check against timm


def timm_line(run: PageRun) -> str:
    """How the model compares with timm's, in a sentence; empty where it was not recorded."""
    check = run.summary.get("timm_check")
    if not isinstance(check, dict):
        return ""
    if not check.get("matched"):
        return f"timm has no counterpart: {check.get('reason', '')}"
    if differences := check.get("differences"):
        return f"differs from timm's {check['matched']}: {differences[0]}"
    if check.get("reason"):
        return f"timm's {check['matched']}: {check['reason']}"
    stages = f"{len(check.get('stages', {}))} stages"
    return f"equal to timm's {check['matched']} in {check.get('tensors')} tensors, {stages} and MACs"


def timm_stages(run: PageRun) -> list[tuple[str, str, str]]:
    """Stage, our output shapes, timm's."""
    check = run.summary.get("timm_check")
    stages = check.get("stages") if isinstance(check, dict) else None
    if not isinstance(stages, dict):
        return []
    return [(name, _shapes(s.get("ours")), _shapes(s.get("timm"))) for name, s in stages.items() if isinstance(s, dict)]


def _shapes(shapes: Any) -> str:
    return ", ".join(" × ".join(map(str, shape)) for shape in shapes) if shapes else "none"
