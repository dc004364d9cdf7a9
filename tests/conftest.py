"""Fixtures shared by tests: the repository, launching its commands, and in-process runs."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The suite owns two cores; threads of a test's processes beyond that only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_finish() -> None:
    """Spare each later garbage collection, of which tests of memory do many, a million objects of the libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def launch() -> Callable[..., subprocess.CompletedProcess]:
    """Run a Python script of the repository as a user would, from the repository's folder."""

    def run(script: str, *args: object, timeout: float = 180, **env: str) -> subprocess.CompletedProcess:
        command = [sys.executable, script, *map(str, args)]
        environment = os.environ | env
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run


@pytest.fixture(scope="session")
def launch_processes() -> Callable[..., list[subprocess.CompletedProcess]]:
    """Run commands that start processes of their own, side by side; whatever happens, nothing of them is left."""

    def run(*commands: list[str], timeout: float = 120, **env: str) -> list[subprocess.CompletedProcess]:
        deadline = time.monotonic() + timeout
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        started = [subprocess.Popen(command, cwd=ROOT, env=os.environ | env, **pipes) for command in commands]
        try:
            said = [process.communicate(timeout=max(1, deadline - time.monotonic())) for process in started]
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return [subprocess.CompletedProcess(p.args, p.returncode, *s) for p, s in zip(started, said, strict=True)]

    return run


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state for the life of a process; a test that builds a run needs a new one."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the debug recipe: 12 steps on digits, with an average. Not to be changed."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from vit_scale.recipe import load_recipe
    from vit_scale.train.run_recipe import run_recipe

    folder = tmp_path_factory.mktemp("trained") / "run"
    recipe = str(ROOT / "recipes/debug.yaml")
    options = ["track.wandb=disabled", "data.workers=0", f"run.dir={folder}"]
    assert run_recipe(load_recipe(recipe, options), recipe) == 0
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return folder
