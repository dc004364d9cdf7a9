"""Distributions of sweep parameters, sampled by Optuna.

A distribution that Optuna does not support (normal, choices with probabilities) is searched by its quantile in [0, 1]:
random samples then follow the distribution exactly, and a Bayesian search has an ordered axis.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from optuna import Trial


class Distribution(Protocol):
    """Distribution of the values of one parameter."""

    @property
    def varies(self) -> bool:
        """Whether there is more than one value."""

    @property
    def log(self) -> bool:
        """Whether the distribution is logarithmic."""

    def draw(self, trial: Trial, key: str) -> Any:
        """Draw a value for `trial` with the study's sampler."""

    def example(self) -> Any:
        """Return a valid value, always the same."""

    def grid(self) -> list[Any] | None:
        """Return all values, or None if there are infinitely many."""


@dataclass(frozen=True)
class Choice:
    """One of several values, equally likely or with `probabilities`; a constant has a single value."""

    values: tuple[Any, ...]
    probabilities: tuple[float, ...] | None = None
    log: bool = False

    @property
    def varies(self) -> bool:
        return len(self.values) > 1

    def draw(self, trial: Trial, key: str) -> Any:
        if self.probabilities is None:
            return json.loads(trial.suggest_categorical(key, [encode(value) for value in self.values]))
        sums = list(accumulate(self.probabilities))
        place = bisect_right(sums, trial.suggest_float(key, 0.0, 1.0) * sums[-1])
        return self.values[min(place, len(self.values) - 1)]

    def example(self) -> Any:
        return self.values[0]

    def grid(self) -> list[Any]:
        return list(self.values)


@dataclass(frozen=True)
class IntUniform:
    """An integer from `low` to `high`, both included."""

    low: int
    high: int
    log: bool = False

    @property
    def varies(self) -> bool:
        return self.low < self.high

    def draw(self, trial: Trial, key: str) -> int:
        return trial.suggest_int(key, self.low, self.high)

    def example(self) -> int:
        return self.low

    def grid(self) -> list[int]:
        return list(range(self.low, self.high + 1))


@dataclass(frozen=True)
class Uniform:
    """A number from `low` to `high`, uniform or log-uniform, rounded to multiples of `step`."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    @property
    def varies(self) -> bool:
        return self.low < self.high

    def draw(self, trial: Trial, key: str) -> float:
        return rounded(trial.suggest_float(key, self.low, self.high, log=self.log), self.step)

    def example(self) -> float:
        return rounded(self.low, self.step)

    def grid(self) -> list[float] | None:
        if self.step is None or self.log:
            return None
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [rounded(place * self.step, self.step) for place in range(first, last + 1)]


@dataclass(frozen=True)
class Normal:
    """A normal or log-normal number with mean `mu` and std `sigma`, rounded to multiples of `step`."""

    mu: float = 0.0
    sigma: float = 1.0
    log: bool = False
    step: float | None = None

    @property
    def varies(self) -> bool:
        return self.sigma > 0

    def draw(self, trial: Trial, key: str) -> float:
        quantile = trial.suggest_float(key, 0.0, 1.0)
        return self._at(NormalDist().inv_cdf(min(max(quantile, 1e-9), 1 - 1e-9)))

    def example(self) -> float:
        return self._at(0.0)

    def grid(self) -> None:
        return None

    def _at(self, stds: float) -> float:
        value = self.mu + self.sigma * stds
        return rounded(math.exp(value) if self.log else value, self.step)


def encode(value: Any) -> str:
    """Encode a choice for Optuna, whose categories must be scalars; ours may be lists."""
    return json.dumps(value)


def rounded(value: float, step: float | None) -> float:
    """Round `value` to a multiple of `step`; an integer if `step` is an integer, as in W&B."""
    if step is None:
        return value
    multiple = round(value / step) * step
    return int(multiple) if isinstance(step, int) else float(f"{multiple:.12g}")
