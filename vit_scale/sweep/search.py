"""Hyperparameter search: an Optuna study in the sweep directory, which persists if the program ends."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit_scale.sweep.distributions import Choice, encode
from vit_scale.sweep.spec import Hyperband, Sweep

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

# Random trials before the Bayesian search starts; Optuna's default of 10 would be an entire small sweep.
RANDOM_STARTUP_TRIALS = 5


class Search:
    """Suggests values and records results; an interrupted trial is suggested again first."""

    def __init__(self, sweep: Sweep, directory: Path, seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.sweep = sweep
        self.study: Study = optuna.create_study(
            study_name="sweep",
            storage=f"sqlite:///{directory / 'study.db'}",
            load_if_exists=True,
            direction=sweep.metric.goal,
            pruner=_pruner(sweep.early),
        )
        # Use a new seed each time, otherwise a resumed search would draw its first values again.
        self.study.sampler = _sampler(sweep.method, seed + len(self.study.trials))
        self._failed_this_time: list[dict[str, Any]] = []

    @property
    def done(self) -> int:
        """Number of trials with a result; failed trials are excluded and are retried when the sweep is rerun."""
        return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in self.study.trials)

    @property
    def best(self) -> float | None:
        """Best result so far."""
        finished = [t.value for t in self.study.trials if t.state.name == "COMPLETE" and t.value is not None]
        return None if not finished else (max if self.sweep.metric.goal == "maximize" else min)(finished)

    def next(self) -> tuple[Trial, dict[str, Any]] | None:
        """Return the next trial and its values, or None if the grid is exhausted."""
        import optuna

        unfinished = [trial for trial in self.study.trials if trial.state.name == "RUNNING"]
        if unfinished:
            trial = optuna.Trial(self.study, unfinished[0]._trial_id)
        else:
            if self.sweep.method == "grid" and not self._queue_next_of_grid():
                return None
            trial = self.study.ask()
        if "values" not in trial.user_attrs:
            trial.set_user_attr("values", self._draw(trial))
        return trial, trial.user_attrs["values"]

    def report(self, trial: Trial, iteration: int, value: float) -> bool:
        """Record an evaluation, counted from 0 as in W&B; returns whether to stop the trial."""
        if iteration in self.study.trials[trial.number].intermediate_values:
            return False  # recorded before the interruption
        trial.report(value, iteration)
        return self.sweep.early is not None and trial.should_prune()

    def finish(self, trial: Trial, value: float) -> None:
        """Record the result of a finished trial."""
        self.study.tell(trial, value)

    def stop(self, trial: Trial) -> None:
        """Record that the trial was stopped early."""
        import optuna

        self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)

    def fail(self, trial: Trial, problem: str) -> None:
        """Record that the trial failed."""
        import optuna

        trial.set_user_attr("problem", problem)
        self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        self._failed_this_time.append(trial.user_attrs["values"])

    def _draw(self, trial: Trial) -> dict[str, Any]:
        if self.sweep.method != "grid":
            return {key: where.draw(trial, key) for key, where in self.sweep.parameters.items()}
        return {key: Choice(tuple(where.grid() or ())).draw(trial, key) for key, where in self.sweep.parameters.items()}

    def _queue_next_of_grid(self) -> bool:
        if any(trial.state.name == "WAITING" for trial in self.study.trials):
            return True  # queued, but interrupted before it was requested
        finished = [t.user_attrs["values"] for t in self.study.trials if t.state.name in ("COMPLETE", "PRUNED")]
        for values in grid(self.sweep):
            if values not in finished and values not in self._failed_this_time:
                self.study.enqueue_trial({key: encode(value) for key, value in values.items()})
                return True
        return False


def grid(sweep: Sweep) -> list[dict[str, Any]]:
    """Return all combinations of values; the last parameter changes fastest."""
    axes = [where.grid() or [] for where in sweep.parameters.values()]
    return [dict(zip(sweep.parameters, values, strict=True)) for values in itertools.product(*axes)]


def _sampler(method: str, seed: int) -> BaseSampler:
    from optuna.samplers import RandomSampler, TPESampler

    return (
        TPESampler(seed=seed, n_startup_trials=RANDOM_STARTUP_TRIALS) if method == "bayes" else RandomSampler(seed=seed)
    )


def _pruner(early: Hyperband | None) -> BasePruner:
    """Build the pruner. W&B's hyperband has one bracket: successive halving over all trials of the sweep."""
    from optuna.pruners import NopPruner, SuccessiveHalvingPruner

    if early is None:
        return NopPruner()
    return SuccessiveHalvingPruner(min_resource=early.min_iter, reduction_factor=early.eta, min_early_stopping_rate=0)
