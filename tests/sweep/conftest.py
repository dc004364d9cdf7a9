"""Fixtures of sweep tests: a folder to run in like the repository's, and trainings of seconds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # agent_server.py

# Options that make recipes/digits.yaml a training of four updates, evaluated after each second one.
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
    """Make a folder that commands find like the repository, but whose runs/ is its own."""

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("launch", "recipes"):
            (folder / name).symlink_to(root / name)
        return folder

    return make


@pytest.fixture(scope="session")
def with_programs() -> dict[str, str]:
    """An environment in which `python`, `accelerate` and `wandb` are those of the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return dict(os.environ) | {"PATH": path}
