"""The search: an optuna study in the sweep's folder, which survives whatever ends the program."""

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

# Random trials before the Bayesian search has something to learn from; optuna's 10 are a whole small sweep.
RANDOM_FIRST = 5


class Search:
    """Hands out values and is told results; a trial that was interrupted is handed out again first."""

    def __init__(self, sweep: Sweep, folder: Path, seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.sweep = sweep
        self.study: Study = optuna.create_study(
            study_name="sweep",
            storage=f"sqlite:///{folder / 'study.db'}",
            load_if_exists=True,
            direction=sweep.metric.goal,
            pruner=_pruner(sweep.early),
        )
        # Another seed each time it is opened, or a search that goes on would draw its first values again.
        self.study.sampler = _sampler(sweep.method, seed + len(self.study.trials))
        self._failed_now: list[dict[str, Any]] = []

    @property
    def done(self) -> int:
        """Trials with a result; one that failed is not, and is made up for when the sweep is run again."""
        return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in self.study.trials)

    @property
    def best(self) -> float | None:
        """The best result so far."""
        finished = [t.value for t in self.study.trials if t.state.name == "COMPLETE" and t.value is not None]
        return None if not finished else (max if self.sweep.metric.goal == "maximize" else min)(finished)

    def next(self) -> tuple[Trial, dict[str, Any]] | None:
        """The next trial and its values, or None when a grid has no more."""
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
        """Tell an evaluation, counted from 0 as W&B does; True where the trial is to be stopped."""
        if iteration in self.study.trials[trial.number].intermediate_values:
            return False  # judged before the interruption
        trial.report(value, iteration)
        return self.sweep.early is not None and trial.should_prune()

    def finish(self, trial: Trial, value: float) -> None:
        self.study.tell(trial, value)

    def stop(self, trial: Trial) -> None:
        """The trial was stopped early."""
        import optuna

        self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)

    def fail(self, trial: Trial, problem: str) -> None:
        import optuna

        trial.set_user_attr("problem", problem)
        self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        self._failed_now.append(trial.user_attrs["values"])

    def _draw(self, trial: Trial) -> dict[str, Any]:
        if self.sweep.method != "grid":
            return {key: where.draw(trial, key) for key, where in self.sweep.parameters.items()}
        return {key: Choice(tuple(where.grid() or ())).draw(trial, key) for key, where in self.sweep.parameters.items()}

    def _queue_next_of_grid(self) -> bool:
        if any(trial.state.name == "WAITING" for trial in self.study.trials):
            return True  # queued, and interrupted before it was asked for
        settled = [t.user_attrs["values"] for t in self.study.trials if t.state.name in ("COMPLETE", "PRUNED")]
        for values in grid(self.sweep):
            if values not in settled and values not in self._failed_now:
                self.study.enqueue_trial({key: encode(value) for key, value in values.items()})
                return True
        return False


def grid(sweep: Sweep) -> list[dict[str, Any]]:
    """All combinations of values, the last parameter changing fastest."""
    axes = [where.grid() or [] for where in sweep.parameters.values()]
    return [dict(zip(sweep.parameters, values, strict=True)) for values in itertools.product(*axes)]


def _sampler(method: str, seed: int) -> BaseSampler:
    from optuna.samplers import RandomSampler, TPESampler

    return TPESampler(seed=seed, n_startup_trials=RANDOM_FIRST) if method == "bayes" else RandomSampler(seed=seed)


def _pruner(early: Hyperband | None) -> BasePruner:
    """What W&B calls hyperband is one bracket: successive halving over all trials of the sweep."""
    from optuna.pruners import NopPruner, SuccessiveHalvingPruner

    if early is None:
        return NopPruner()
    return SuccessiveHalvingPruner(min_resource=early.min_iter, reduction_factor=early.eta, min_early_stopping_rate=0)
