"""Read metrics.jsonl as curves: one value per step, downsampled if there are too many."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit_scale.page.recorded import is_number

MAX_POINTS = 2000
"""Points of a curve on the page; more than a screen has columns."""
NOT_CURVES = {"step", "epoch", "images"}
SPEED = "speed/images_per_second"

Value = float | None
"""None if the number was not finite."""

OLD_KEYS = {"train/bad_steps": "train/skipped_steps"}
"""Keys that earlier versions wrote."""


@dataclass
class Metrics:
    """The curves of a run, and the position of each step on the other axes."""

    curves: dict[str, dict[int, Value]] = field(default_factory=dict)
    """Key of metrics.jsonl -> step -> value, by ascending step."""
    epochs: dict[int, float] = field(default_factory=dict)
    images: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    """Training time without evaluation and checkpointing, from the images and the speed of each logged step."""
    unreadable_lines: int = 0

    @property
    def last_step(self) -> int:
        return max((max(curve) for curve in self.curves.values()), default=0)

    def last(self, key: str) -> Value:
        """Return the last value of a curve."""
        curve = self.curves.get(key)
        return curve[max(curve)] if curve else None


def read_metrics(path: Path, global_batch: int) -> Metrics:
    """Read the curves of a metrics.jsonl, which may be missing, end in a partial line or still be written to."""
    metrics = Metrics()
    lines = _read_lines(path, metrics)
    # A killed run may have logged a step twice: the later line belongs to the weights that were kept.
    for line in sorted(lines, key=lambda line: line["step"]):
        step = line["step"]
        for key, value in line.items():
            key = OLD_KEYS.get(key, key)  # noqa: PLW2901
            if key not in NOT_CURVES and (value is None or is_number(value)):
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


def _finite(value: Any) -> Value:
    return value if is_number(value) and math.isfinite(value) else None


def _training_seconds(metrics: Metrics) -> dict[int, float]:
    """Return the seconds of training up to each step; a step without a speed has the value of the one before it."""
    speeds, seconds, elapsed, before = metrics.curves.get(SPEED, {}), {}, 0.0, 0.0
    for step, images in metrics.images.items():
        if speed := speeds.get(step):
            elapsed += (images - before) / speed
            before = images
        seconds[step] = elapsed
    return seconds if speeds else {}


def interpolate(known: Mapping[int, float], step: int) -> float | None:
    """Return the value at `step` between the known steps, which ascend, and zero at step 0; None after the last."""
    if step in known:
        return known[step]
    steps = list(known)
    after = bisect_left(steps, step)
    if after == len(steps):
        return None
    low = steps[after - 1] if after else 0
    start = known[low] if after else 0.0
    return start + (known[steps[after]] - start) * (step - low) / (steps[after] - low)


def downsample(values: Sequence[Value], most: int = MAX_POINTS) -> list[int]:
    """Return indices of about `most` values with the same envelope: minimum, maximum and gaps of each interval."""
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for interval in _intervals(len(values), most // 2):
        numbers = [(value, i) for i in interval if (value := values[i]) is not None]
        if numbers:
            kept |= {min(numbers)[1], max(numbers)[1]}
        if len(numbers) < len(interval):
            kept.add(next(i for i in interval if values[i] is None))
    return sorted(kept)


def _intervals(length: int, count: int) -> Iterator[range]:
    for i in range(count):
        yield range(i * length // count, (i + 1) * length // count)
