"""Print the summary of a trial."""

from __future__ import annotations

from vit_scale.format import duration, long_duration, memory_size, significant
from vit_scale.record.terminal import Terminal
from vit_scale.trial.measurements import Measurements


def print_summary(measured: Measurements, terminal: Terminal) -> None:
    """Print what worked, how fast it was, and how long the whole run takes here."""
    terminal.info("")
    terminal.title("Trial failed" if measured.failed else "Trial passed")
    terminal.rows(summary_rows(measured))


def summary_rows(measured: Measurements) -> dict[str, str]:
    """Return the summary as name and text."""
    rows = {check.part: f"{'passed' if check.passed else 'FAILED'}: {check.text}" for check in measured.checks}
    if measured.trial_plan is not None:
        rows |= _speed(measured)
    if measured.memory:
        rows["memory"] = f"{memory_size(measured.memory)} per process at its peak"
    return rows | _changes(measured)


def _speed(measured: Measurements) -> dict[str, str]:
    plan, trial = measured.plan, measured.trial_plan
    assert trial is not None
    step = measured.step_seconds
    wait = f"waiting for data {measured.wait_seconds / step:.0%}"
    rows = {"speed": f"{significant(trial.global_batch / step, 3)} images/s, {_seconds(step)} per step, {wait}"}
    if not plan.steps:
        return rows | {"whole run": "unknown length: the number of training images is unknown"}
    real = measured.real_step_seconds
    steps = f"{plan.steps:,} steps of {plan.global_batch:,} images in {_seconds(real)} each"
    parts = [f"{steps}: {long_duration(measured.train_seconds)}"]
    if measured.eval_batch_seconds and measured.size.val_images:
        parts.append(f"{measured.evaluations:,} evaluations: {long_duration(measured.eval_seconds)}")
    total = measured.train_seconds + measured.eval_seconds + measured.save_seconds
    return rows | {"whole run": f"about {long_duration(total)} on this system ({'; '.join(parts)})"}


def _changes(measured: Measurements) -> dict[str, str]:
    """Return in what the trial differs from the recipe."""
    changes = dict(measured.notes)
    plan, trial = measured.plan, measured.trial_plan
    if trial is not None and trial.global_batch != plan.global_batch:
        changes["batch size"] = f"{trial.format_batch_size()} instead of {plan.global_batch:,}, without accumulation"
    if trial is not None and measured.is_slow:
        changes["steps"] = f"{measured.steps} instead of {trial.steps}, because they are slow; --try N takes all N"
    return {f"changed {name}": text for name, text in changes.items()}


def _seconds(seconds: float) -> str:
    return f"{significant(seconds, 2)}s" if seconds < 60 else duration(seconds)
