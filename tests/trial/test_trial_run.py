"""`launch/train.py RECIPE --try`: what it checks, and that nothing of it stays."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vit_scale import gpu
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.commands.train import main, parse
from vit_scale.errors import UserError
from vit_scale.record.terminal import Terminal
from vit_scale.train.state import TrainState
from vit_scale.trial import trial_run
from vit_scale.trial.measurements import Measurements

DEBUG = "recipes/debug.yaml"
LaunchProcesses = Callable[..., list[subprocess.CompletedProcess]]


@pytest.fixture(autouse=True)
def here(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository; temporary files are in a directory of the test."""
    monkeypatch.chdir(root)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("steps", [["--try"], ["--try", "2"], ["--try=7"]], ids=str)
def test_everything_is_tried_and_nothing_is_kept(
    steps: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sorted(Path("runs").glob("*"))
    assert main([DEBUG, *steps, "data.workers=0"]) == 0
    output = capsys.readouterr().out
    assert "Trial passed" in output
    for part in ("train", "evaluate", "save", "resume"):
        assert f"{part} " in output
    assert "bit-identical" in output
    assert "images/s" in output
    assert "whole run" in output
    assert list(here.glob("vit_scale-try-*")) == []
    assert sorted(Path("runs").glob("*")) == runs


def test_slow_steps_are_fewer_unless_their_number_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial_run, "STEPS_SECONDS", 0.0)
    assert main([DEBUG, "--try", "data.workers=0"]) == 0
    assert "3 instead of 20, because they are slow" in capsys.readouterr().out
    assert main([DEBUG, "--try", "8", "data.workers=0"]) == 0
    assert "because they are slow" not in capsys.readouterr().out


def test_memory_on_a_gpu_is_that_of_steps_and_not_of_trying_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [70_000_000_000]
    monkeypatch.setattr(gpu, "reset_peak_memory", lambda device: peaks.append(0))
    monkeypatch.setattr(gpu, "peak_memory", lambda device: peaks[-1])
    monkeypatch.setattr(gpu, "synchronize", lambda device: None)

    def take_step(run: Any, batch: None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        run.state.step += 1
        peaks[-1] = max(peaks[-1], 20_000_000_000)
        return {"loss": torch.ones(())}, torch.ones(())

    monkeypatch.setattr("vit_scale.train.loop.take_step", take_step)
    run: Any = SimpleNamespace(
        device=torch.device("cuda"),
        plan=SimpleNamespace(steps=4),
        state=SimpleNamespace(step=0, skipped_steps=torch.zeros(())),
        record=SimpleNamespace(terminal=Terminal(enabled=False)),
        task=SimpleNamespace(metrics=[]),
    )
    measured: Any = SimpleNamespace(read_steps=lambda *_: None, passed=lambda text: None)
    trial_run._train(run, iter([[]] * 4), measured, limited=False)
    Measurements.read_memory(measured, run.device)
    assert measured.memory == 20_000_000_000


def test_memory_on_a_cpu_includes_the_copy_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    save, read = trial_run._save, Measurements.read_memory
    monkeypatch.setattr(trial_run, "_save", lambda *given: (order.append("save"), save(*given))[1])
    monkeypatch.setattr(Measurements, "read_memory", lambda *given: (order.append("memory"), read(*given))[1])
    assert main([DEBUG, "--try", "2", "data.workers=0"]) == 0
    assert order == ["save", "memory"]


def test_single_process_with_zero(launch: Callable[..., subprocess.CompletedProcess]) -> None:
    done = launch("launch/train.py", DEBUG, "--try", "5", "parallel.strategy=zero3", "data.workers=0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-identical" in done.stdout


def test_missing_data_are_replaced_by_synthetic_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([DEBUG, "--try", "4", "data.source=uoft-cs/cifar10", "data.workers=0"]) == 0
    output = capsys.readouterr().out
    assert "synthetic images instead of uoft-cs/cifar10" in output
    assert "12 steps of 32 images" in output


def test_missing_weights_are_replaced_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([DEBUG, "--try", "4", "model.weights=runs/no-such-run", "data.workers=0"]) == 0
    assert "random instead of runs/no-such-run" in capsys.readouterr().out


def test_state_that_is_not_restored_exactly_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restore = TrainState.restore

    def inexact(state: TrainState, checkpoint: object) -> None:
        restore(state, checkpoint)  # type: ignore[arg-type]
        with torch.no_grad():
            next(state.model.parameters()).add_(1e-3)

    monkeypatch.setattr(TrainState, "restore", inexact)
    assert main([DEBUG, "--try", "6", "data.workers=0"]) == 1
    output = capsys.readouterr().out
    assert "Trial failed" in output
    assert "FAILED: from step 3, but the weights differ" in output


def test_failed_save_is_named_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(CheckpointFolder, "_write", full)
    assert main([DEBUG, "--try", "4", "data.workers=0"]) == 1
    output = capsys.readouterr().out
    assert "FAILED: No space left on device" in output
    assert "evaluate" in output
    assert list(here.glob("vit_scale-try-*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--try", "1"], "--try 1: the number of steps must be at least 2"),
        (["--try", "--dry-run"], "mutually exclusive"),
        (["--try", "optim.name=adamww"], "adamw"),
        (["--try", "model.num_classes=3"], "the data has 10 classes"),
    ],
)
def test_invalid_input_is_an_error(arguments: list[str], message: str, here: Path) -> None:
    with pytest.raises(UserError, match=message):
        main([DEBUG, *arguments, "data.workers=0"])
    assert list(here.glob("vit_scale-try-*")) == []


@pytest.mark.parametrize("arguments", [["--try", DEBUG, "optim.lr=1"], [DEBUG, "--try", "optim.lr=1"]], ids=str)
def test_flag_may_stand_anywhere(arguments: list[str]) -> None:
    args, overrides = parse(arguments)
    assert (args.recipe, args.trial_steps, overrides) == (DEBUG, "auto", ["optim.lr=1"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launcher would use every GPU")
def test_two_processes_with_zero2(launch_processes: LaunchProcesses, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = ["launch/train.py", DEBUG, "--try", "5", "parallel.strategy=zero2", "data.workers=0"]
    (done,) = launch_processes([*command, *arguments], TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Trial passed") == 1
    assert "bit-identical" in done.stdout
    assert "2 processes x 1 accumulation step x 16 images" in done.stdout
    assert not list(tmp_path.glob("vit_scale-try*"))
