"""Fixtures for sweep tests: a working directory laid out like the repository, and trials that take seconds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # agent_server.py

# Options that reduce recipes/digits.yaml to four steps, evaluated every second step.
TINY = {
    "schedule.epochs": 0.08,
    "schedule.warmup_epochs": 0,
    "model.embed_dim": 16,
    "run.eval_every": 2,
    "run.log_every": 1,
    "data.workers": 0,
    "track.images": "never",
}


@pytest.fixture(scope="session")
def tiny() -> dict[str, object]:
    return dict(TINY)


@pytest.fixture(scope="session")
def make_checkout(root: Path):  # type: ignore[no-untyped-def]
    """Create a directory laid out like the repository, with a separate runs/."""

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("launch", "recipes"):
            (folder / name).symlink_to(root / name)
        return folder

    return make


@pytest.fixture(scope="session")
def with_programs() -> dict[str, str]:
    """Environment in which `python`, `accelerate` and `wandb` are those running the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return dict(os.environ) | {"PATH": path}
