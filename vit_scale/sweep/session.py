"""The trainings of a sweep from one start of the program to its end: ask the search, train, tell the search."""

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
from vit_scale.sweep.trial import Outcome, find_trainer, run_training

if TYPE_CHECKING:
    from optuna import Trial

# After so many failures in a row, the next training would most likely fail too.
FAILURES_IN_A_ROW = 3


@dataclass
class Session:
    """Trains what the search asks for, one after another."""

    sweep: Sweep
    folder: Path
    search: Search
    display: Display
    options: Sequence[str] = ()
    trial: int = 0
    """The trial that is trained."""
    failures: dict[int, str] = field(default_factory=dict)
    """What went wrong, by trial."""
    _failed_in_a_row: int = 0

    def run(self, trainings: int) -> None:
        """Train until there were `trainings` of them, the grid is spent or the target is reached.

        Raises `UserError` where it is of no use to go on.
        """
        metric = self.sweep.metric
        for _ in range(trainings):
            best = self.search.best
            if best is not None and metric.reached(best):
                self.display.say(f"{metric.name} has reached its target {metric.target:g}.")
                return
            asked = self.search.next()
            if asked is None:
                return
            self._run_one(*asked)

    def _run_one(self, trial: Trial, values: dict[str, Any]) -> None:
        self.trial = trial.number
        folder = self.folder / trial_name(trial.number)
        _refuse_second_trainer(folder)
        varied = {key: value for key, value in values.items() if key in self.sweep.varied}
        self.display.begin(trial.number, varied, resumed=(folder / "config.yaml").exists())
        outcome = self._train(trial, values, folder)
        if outcome.kind == "finished" and outcome.value is not None:
            self.search.finish(trial, outcome.value)
        elif outcome.kind == "stopped":
            self.search.stop(trial)
        else:
            self.search.fail(trial, outcome.problem)
        self.display.end(trial.number, outcome, self.search.best)
        self._count_failure(outcome, folder / "output.log")

    def _train(self, trial: Trial, values: dict[str, Any], folder: Path) -> Outcome:
        quiet = ["track.wandb=disabled"] if self.sweep.wandb == "auto" else []
        return run_training(
            build_command(self.sweep, values, [*quiet, *self.options, f"run.dir={folder}"]),
            folder,
            self.sweep.metric.name,
            judge=lambda iteration, value: self.search.report(trial, iteration, value),
            show=self.display.progress,
            stopping=lambda: self.display.say(
                f"Stopping trial {self.trial}, which saves first. Ctrl-C again kills it."
            ),
        )

    def _count_failure(self, outcome: Outcome, log: Path) -> None:
        if outcome.kind != "failed":
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        self.failures[self.trial] = outcome.problem
        if outcome.metric_missing and self.search.best is None:
            raise UserError(f"{self.sweep.path}: metric.name: {outcome.problem}\nIts output is in {log}.")
        if self._failed_in_a_row == FAILURES_IN_A_ROW:
            raise UserError(
                f"{FAILURES_IN_A_ROW} trainings in a row have failed, the last with: {outcome.problem}\n"
                f"Its output is in {log}. Once that is mended, the same command goes on."
            )


def _refuse_second_trainer(folder: Path) -> None:
    process = find_trainer(folder)
    if process is not None:
        raise UserError(
            f"{folder} is being trained by process {process}, of another sweep in this folder or of one that was "
            f"killed.\nWait for it, or end it with `kill {process}`; it saves, and the same command goes on."
        )
