"""metrics.jsonl as curves: what is whole is read, one value a step, thinned out where there are too many."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_POINTS = 2000
"""Points of a curve in the page; more than a screen has columns."""
NOT_CURVES = {"step", "epoch", "images"}
SPEED = "speed/images_per_second"

Value = float | None
"""None where the run had a number that is not finite."""

OLD_KEYS = {"train/bad_steps": "train/skipped_steps"}
"""Keys that earlier versions wrote."""


@dataclass
class Metrics:
    """The curves of a run, and where each step stands on the other axes."""

    curves: dict[str, dict[int, Value]] = field(default_factory=dict)
    """Key of metrics.jsonl -> step -> value, by rising step."""
    epochs: dict[int, float] = field(default_factory=dict)
    images: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    """Time spent in training alone, from the images and the speed of each logged step."""
    unreadable_lines: int = 0

    @property
    def last_step(self) -> int:
        return max((max(curve) for curve in self.curves.values()), default=0)

    def last(self, key: str) -> Value:
        """The last value of a curve."""
        curve = self.curves.get(key)
        return curve[max(curve)] if curve else None


def read_metrics(path: Path, global_batch: int) -> Metrics:
    """The curves of a metrics.jsonl, which may be missing, end in half a line or still be written to."""
    metrics = Metrics()
    lines = _read_lines(path, metrics)
    # A killed run may have logged a step twice: the later line is the one whose weights live on.
    for line in sorted(lines, key=lambda line: line["step"]):
        step = line["step"]
        for key, value in line.items():
            key = OLD_KEYS.get(key, key)  # noqa: PLW2901
            if key not in NOT_CURVES and (value is None or _is_number(value)):
                metrics.curves.setdefault(key, {})[step] = _finite(value)
        if _finite(line.get("epoch")) is not None:
            metrics.epochs[step] = line["epoch"]
        seen = _finite(line.get("images"))
        metrics.images[step] = step * global_batch if seen is None else seen
    metrics.seconds = _training_seconds(metrics)
    return metrics


def _read_lines(path: Path, metrics: Metrics) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = []
    for text_line in text.splitlines():
        try:
            line = json.loads(text_line)
            if type(line["step"]) is not int:
                raise ValueError(line["step"])
            lines.append(line)
        except (ValueError, TypeError, KeyError):
            metrics.unreadable_lines += bool(text_line.strip())
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> Value:
    return value if _is_number(value) and math.isfinite(value) else None


def _training_seconds(metrics: Metrics) -> dict[int, float]:
    """Seconds of training up to each step; a step without a speed stands where the one before it does."""
    speeds, seconds, elapsed, before = metrics.curves.get(SPEED, {}), {}, 0.0, 0.0
    for step, images in metrics.images.items():
        if speed := speeds.get(step):
            elapsed += (images - before) / speed
            before = images
        seconds[step] = elapsed
    return seconds if speeds else {}


def thin(values: Sequence[Value], most: int = MOST_POINTS) -> list[int]:
    """Indices of about `most` values that draw the same picture: of each stretch its lowest and highest, and gaps."""
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for stretch in _stretches(len(values), most // 2):
        numbers = [(value, i) for i in stretch if (value := values[i]) is not None]
        if numbers:
            kept |= {min(numbers)[1], max(numbers)[1]}
        if len(numbers) < len(stretch):
            kept.add(next(i for i in stretch if values[i] is None))
    return sorted(kept)


def _stretches(length: int, count: int) -> Iterator[range]:
    for i in range(count):
        yield range(i * length // count, (i + 1) * length // count)
