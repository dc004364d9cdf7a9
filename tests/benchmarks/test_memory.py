"""The memory model predicts full runs with ZeRO, measured by the benchmark."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import run_script


@pytest.fixture
def memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "benchmarks")
    memory = importlib.import_module("memory")
    monkeypatch.setattr(memory, "run_program", run_program)
    return memory


def run_program(command: list[str], environment: dict[str, str]) -> str:
    """Run the command of the benchmark without its launcher, torchrun."""
    script = next(word for word in command if word.endswith(".py"))
    done = run_script(script, *command[command.index(script) + 1 :], processes=2, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_peak_of_a_zero_run_is_predicted_within_10_percent(strategy: str, memory: ModuleType) -> None:
    tree = memory.recipe("vit_cifar_512x6", 4, strategy)
    tree["model"]["depth"] = 3
    expected = memory.predict(tree, strategy, 4)
    assert expected == pytest.approx(memory.measure(tree), rel=0.1)
