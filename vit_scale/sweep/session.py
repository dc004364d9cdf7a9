"""Trials of one launch of a sweep: get values from the search, train, record the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_scale.errors import UserError
from vit_scale.sweep.command import build_command
from vit_scale.sweep.display import Display
from vit_scale.sweep.results import trial_name
from vit_scale.sweep.search import Search
from vit_scale.sweep.spec import Sweep
from vit_scale.sweep.trial import Outcome, find_trainer, run_trial

if TYPE_CHECKING:
    from optuna import Trial

# After this many consecutive failures, the next trial would most likely fail too.
MAX_CONSECUTIVE_FAILURES = 3


@dataclass
class Session:
    """Runs the trials that the search suggests, one at a time."""

    sweep: Sweep
    directory: Path
    search: Search
    display: Display
    options: Sequence[str] = ()
    trial: int = 0
    """Number of the current trial."""
    failures: dict[int, str] = field(default_factory=dict)
    """Error message by trial."""
    _consecutive_failures: int = 0

    def run(self, trials: int) -> None:
        """Run up to `trials` trials, until the grid is exhausted or the target is met.

        Raises `UserError` if continuing is pointless.
        """
        metric = self.sweep.metric
        for _ in range(trials):
            best = self.search.best
            if best is not None and metric.is_met(best):
                self.display.info(f"Target met: {metric.name} {best:g} (target {metric.target:g}).")
                return
            suggestion = self.search.next()
            if suggestion is None:
                return
            self._run_one(*suggestion)

    def _run_one(self, trial: Trial, values: dict[str, Any]) -> None:
        self.trial = trial.number
        directory = self.directory / trial_name(trial.number)
        _check_not_training(directory)
        varied = {key: value for key, value in values.items() if key in self.sweep.varied}
        self.display.begin(trial.number, varied, resumed=(directory / "config.yaml").exists())
        outcome = self._train(trial, values, directory)
        if outcome.kind == "finished" and outcome.value is not None:
            self.search.finish(trial, outcome.value)
        elif outcome.kind == "stopped":
            self.search.stop(trial)
        else:
            self.search.fail(trial, outcome.problem)
        self.display.end(trial.number, outcome, self.search.best)
        self._count_failure(outcome, directory / "output.log")

    def _train(self, trial: Trial, values: dict[str, Any], directory: Path) -> Outcome:
        quiet = ["track.wandb=disabled"] if self.sweep.wandb == "auto" else []
        return run_trial(
            build_command(self.sweep, values, [*quiet, *self.options, f"run.dir={directory}"]),
            directory,
            self.sweep.metric.name,
            judge=lambda iteration, value: self.search.report(trial, iteration, value),
            show=self.display.progress,
            stopping=lambda: self.display.info(
                f"Stopping trial {self.trial} after it saves a checkpoint. Press Ctrl-C again to kill it."
            ),
        )

    def _count_failure(self, outcome: Outcome, log: Path) -> None:
        if outcome.kind != "failed":
            self._consecutive_failures = 0
            return
        self._consecutive_failures += 1
        self.failures[self.trial] = outcome.problem
        if outcome.metric_missing and self.search.best is None:
            raise UserError(f"{self.sweep.path}: metric.name: {outcome.problem}\nOutput: {log}")
        if self._consecutive_failures == MAX_CONSECUTIVE_FAILURES:
            raise UserError(
                f"{MAX_CONSECUTIVE_FAILURES} consecutive trials failed, the last one with: {outcome.problem}\n"
                f"Output: {log}. Fix the problem, then rerun the same command to resume."
            )


def _check_not_training(directory: Path) -> None:
    process = find_trainer(directory)
    if process is not None:
        raise UserError(
            f"{directory} is in use by process {process}, from another or a killed sweep in this directory.\n"
            f"Wait for it, or stop it with `kill {process}` (it saves a checkpoint), then rerun the same command."
        )
