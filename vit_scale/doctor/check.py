"""The result of a check, and the setup that every check receives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["works", "slow", "broken", "skipped"]
STATUSES: tuple[Status, ...] = ("works", "slow", "broken", "skipped")

ROOT = Path(__file__).resolve().parents[2]
"""Directory that contains the package: the repository, if this is not an installed copy."""
GROUPS = {
    "versions": "packages: supported, tested, and loading together",
    "devices": "CPU and GPUs",
    "attention": "attention kernels against the explicit computation",
    "precision": "fp32, TF32, bf16, fp16 and torch.compile",
    "compute": "matmul and memory speed beside the datasheet",
    "communication": "collectives between GPUs, or between two processes",
    "loading": "images per second of the loader against what the devices ask for",
    "disk": "checkpoint speed, free space, locks and shared memory",
    "tracking": "W&B login and the Hugging Face Hub",
    "network": "launcher settings, environment variables, interfaces",
    "training": "every strategy and precision against fp32 on one process; save and resume",
}


@dataclass(frozen=True)
class Check:
    """What was found out about one thing."""

    name: str
    status: Status
    """`skipped`: this machine does not have it, or training does not use it."""
    value: str = ""
    """What was measured, or why it is slow, broken or skipped."""
    advice: str = ""
    """What to do; empty if there is nothing to do."""
    required: bool = True
    """Whether training here relies on it. False: training works without it, or refuses it with a message."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Measurements for the report in JSON."""
    seconds: float = 0.0
    """How long it took."""


@dataclass(frozen=True)
class Setup:
    """The setup that every check receives."""

    scratch: str
    """Empty directory, deleted afterwards."""
    run_dir: str = "."
    """Directory that runs are written to, whose disk is checked."""
    gpus: int = 0
    quick: bool = False
    """Smaller measurements."""
    events: str | None = None
    """File that the process which shows the progress reads."""

    @property
    def processes(self) -> int:
        """Processes of checks that need several: one per GPU; without a GPU two, over gloo."""
        return self.gpus or 2

    @property
    def device(self) -> str:
        """Device type to check."""
        return "cuda" if self.gpus else "cpu"

    def stage(self, text: str) -> None:
        """Show what a long check is doing now; the text is part of the message if the process dies."""
        self.emit({"stage": text})

    def emit(self, event: dict[str, Any]) -> None:
        """Append a line to the events."""
        if self.events is not None:
            with Path(self.events).open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


def largest(errors: Iterable[float]) -> float:
    """Return the largest of `errors`; infinity if one is NaN, which `max` may pass over and no tolerance rejects."""
    listed = list(errors)
    return math.inf if any(map(math.isnan, listed)) else max(listed)


def works(name: str, value: str, *, advice: str = "", **numbers: Any) -> Check:
    """Return the check of something that works."""
    return Check(name, "works", value, advice, numbers=numbers)


def slow(name: str, value: str, advice: str, **numbers: Any) -> Check:
    """Return the check of something that gives right results, but too slowly."""
    return Check(name, "slow", value, advice, numbers=numbers)


def broken(name: str, value: str, advice: str, *, required: bool = True, **numbers: Any) -> Check:
    """Return the check of something that fails or gives wrong results."""
    return Check(name, "broken", value, advice, required, numbers)


def skipped(name: str, reason: str, advice: str = "") -> Check:
    """Return a check that does not apply here."""
    return Check(name, "skipped", reason, advice, required=False)
