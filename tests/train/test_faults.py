"""Each fault for real: processes that are killed, stopped, out of disk space or poisoned, and the run that results.

Real processes run the real entry point; a forkserver spares each of them the imports.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.processes import kill, rank_variables, start_process
from tests.workers import preloaded
from vit_scale.checkpoints.find import checkpoint_error, latest_valid_checkpoint, list_checkpoints, step_of
from vit_scale.config import DataConfig
from vit_scale.data.data import open_data
from vit_scale.data.sampling import TrainIndices
from vit_scale.strategies.rank_failure import RANK_FAILURE_EXIT_CODE

RECIPE = "recipes/debug.yaml"
TINY = ["data.source=synthetic", "data.synthetic_images=64", "data.synthetic_size=8", "data.synthetic_classes=4"]
BATCH = ["batch.global=16", "batch.micro=4", "augment.rand_augment="]
QUICK = [*TINY, *BATCH, "track.wandb=disabled", "data.workers=0", "run.eval_every=10000", "run.log_every=10"]
KILLS, KILLS_OF_TWO = 20, 5
LONG, SHORT, ENDLESS = "schedule.steps=150", "schedule.steps=60", "schedule.steps=100000"
PATIENCE = 120.0


class Trainer:
    """Starts processes of `launch/train.py` and leaves none running."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self._started: list[BaseProcess] = []

    def start(
        self, folder: Path, *options: str, environment: dict[str, str] | None = None, **faults: int
    ) -> BaseProcess:
        arguments = [RECIPE, *QUICK, f"run.dir={folder}", *options]
        process = start_process(
            preloaded.train, arguments, os.environ | (environment or {}), str(self.log(folder)), **faults
        )
        self._started.append(process)
        return process

    def start_two(self, folder: Path, *options: str) -> list[BaseProcess]:
        return [self.start(folder, *options, environment=environment) for environment in rank_variables(2)]

    def train(self, folder: Path, *options: str, **faults: int) -> int | None:
        return status(self.start(folder, *options, **faults))

    def log(self, folder: Path) -> Path:
        return self.top / f"{folder.name}.log"

    def output(self, folder: Path) -> str:
        return self.log(folder).read_text()

    def close(self) -> None:
        kill(self._started)


def status(process: BaseProcess) -> int | None:
    """Return the exit status, or None if the process does not end."""
    process.join(PATIENCE)
    return process.exitcode


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("faults"))
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def reference(trainer: Trainer) -> Path:
    """One process, never interrupted."""
    assert trainer.train(trainer.top / "reference", LONG) == 0, trainer.output(trainer.top / "reference")
    return trainer.top / "reference"


@pytest.fixture(scope="module")
def reference_of_two(trainer: Trainer) -> Path:
    """Two processes, never interrupted."""
    folder = trainer.top / "reference-of-two"
    assert [status(process) for process in trainer.start_two(folder, SHORT)] == [0, 0], trainer.output(folder)
    return folder


def assert_same_weights(ours: Path, theirs: Path) -> None:
    for name in ("model.safetensors", "model_ema.safetensors"):
        torch.testing.assert_close(load_file(ours / name), load_file(theirs / name), rtol=0, atol=0)


def newest_step(folder: Path) -> int:
    return max(map(step_of, list_checkpoints(folder / "checkpoints")), default=0)


def write_images(folder: Path) -> None:
    """32 training and 4 validation images of two classes."""
    for split, each in (("train", 16), ("val", 2)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(each):
                Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / split / name / f"{number:02}.jpg")


def is_saving(folder: Path) -> bool:
    return any((folder / "checkpoints").glob(".partial-*"))


def wait_until(happened: Callable[[], bool], processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "nothing happens"
        assert all(process.exitcode is None for process in processes), "ended too early"
        time.sleep(0.001)


def kill_at_random(processes: list[BaseProcess], folder: Path, draw: random.Random) -> bool:
    """SIGKILL one or all while starting, between two steps or while saving; True if a save was in progress."""
    victims = processes
    saves, while_saving = draw.choice([0, 1, 1, 2]), draw.random() < 0.5
    if saves == 0:
        time.sleep(draw.uniform(0, 0.5))
    else:
        victims = draw.choice([processes, processes[:1], processes[-1:]])
        goal = newest_step(folder) + saves
        wait_until(lambda: newest_step(folder) >= goal, processes)
        if while_saving:
            wait_until(lambda: is_saving(folder), processes)
        time.sleep(draw.uniform(0, 0.01))
    for victim in victims:
        victim.kill()
    expected = [-signal.SIGKILL if process in victims else RANK_FAILURE_EXIT_CODE for process in processes]
    assert [status(process) for process in processes] == expected
    return is_saving(folder)


def test_run_killed_20_times_ends_with_the_weights_of_an_uninterrupted_run(trainer: Trainer, reference: Path) -> None:
    folder, draw = trainer.top / "killed", random.Random(0)
    options = [LONG, "run.save_every=1"]
    killed_while_saving = sum(kill_at_random([trainer.start(folder, *options)], folder, draw) for _ in range(KILLS))
    assert trainer.train(folder, *options) == 0, trainer.output(folder)
    assert killed_while_saving >= 5
    assert_same_weights(folder, reference)
    assert not is_saving(folder), "no partial checkpoints are left"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(10, 151, 10)), "each is logged once"
    assert "Traceback" not in trainer.output(folder)


def test_two_processes_killed_5_times_end_with_the_weights_of_an_uninterrupted_run(
    trainer: Trainer, reference_of_two: Path
) -> None:
    folder, draw = trainer.top / "killed-two", random.Random(1)
    options = [SHORT, "run.save_every=1"]
    for _ in range(KILLS_OF_TWO):
        kill_at_random(trainer.start_two(folder, *options), folder, draw)
    assert [status(process) for process in trainer.start_two(folder, *options)] == [0, 0], trainer.output(folder)
    assert_same_weights(folder, reference_of_two)
    assert not is_saving(folder), "no partial checkpoints are left"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_failure_ends_the_other_ranks_with_instructions_to_resume(
    trainer: Trainer, fault: signal.Signals, victim: int
) -> None:
    folder = trainer.top / f"failed-{fault.name}-{victim}"
    seconds = 3 if fault == signal.SIGSTOP else 600
    processes = trainer.start_two(folder, ENDLESS, "run.save_every=1", f"parallel.timeout_seconds={seconds}")
    wait_until(lambda: newest_step(folder) >= 2, processes)
    os.kill(processes[victim].pid, fault)  # type: ignore[arg-type]
    assert status(processes[1 - victim]) == RANK_FAILURE_EXIT_CODE, trainer.output(folder)
    output = trainer.output(folder)
    assert f"error: rank {1 - victim} of 2: another rank exited or did not respond" in output
    assert f"parallel.timeout_seconds = {seconds}" in output
    assert "Rerun the same command to resume after step" in output
    assert "Traceback" not in output
    assert latest_valid_checkpoint(folder)[0] is not None


@pytest.mark.parametrize("reader", [1, 0])
def test_error_of_one_rank_is_printed_once_with_its_rank(trainer: Trainer, tmp_path: Path, reader: int) -> None:
    images, folder = tmp_path / "images", trainer.top / f"corrupt-{reader}"
    write_images(images)
    data = open_data(DataConfig(source=str(images)), seed=0)
    ranks = TrainIndices(global_batch=16, micro_batch=8, rank=reader, world=2, end_step=1, seed=0, images=32)
    _, indices = next(iter(ranks))
    corrupt = Path(data.train.describe(indices[0]).split(" (row")[0])
    corrupt.write_bytes(b"corrupt")
    processes = trainer.start_two(folder, f"data.source={images}", SHORT)
    assert status(processes[reader]) == 2, trainer.output(folder)
    assert status(processes[1 - reader]) == RANK_FAILURE_EXIT_CODE, trainer.output(folder)
    output = trainer.output(folder)
    assert output.count(f"error: rank {reader} of 2: ") == 1, output
    # Without a launcher, rank 0 has the store through which the others learn that it has reported its error.
    assert output.count("error:") == 1 or reader == 0, output
    assert str(corrupt) in output
    assert "Traceback" not in output


def test_error_of_all_ranks_is_printed_once(trainer: Trainer) -> None:
    folder = trainer.top / "all-ranks"
    processes = trainer.start_two(folder, SHORT, "run.resume=nothing/here")
    assert [status(process) for process in processes] == [2, 2], trainer.output(folder)
    output = trainer.output(folder)
    assert output.count("error:") == 1, output
    assert "error: run.resume" in output


def test_launcher_restarts_a_run_after_a_rank_failure(
    trainer: Trainer, reference_of_two: Path, launch_processes: Callable[..., list[subprocess.CompletedProcess]]
) -> None:
    folder, flag = trainer.top / "restarted", trainer.top / "died"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    options = [*QUICK, SHORT, f"run.dir={folder}", "run.save_every=1", "parallel.timeout_seconds=60"]
    worker = ["tests/workers/dies_once.py", str(flag), RECIPE, *options]
    (done,) = launch_processes([*launcher, "--max_restarts", "3", *worker])
    assert done.returncode == 0, done.stderr[-3000:]
    assert flag.exists(), "it did die"
    assert done.stdout.count("Resuming from") == 1, "one restart is enough"
    assert_same_weights(folder, reference_of_two)


def test_run_resumes_after_sigterm_to_all_processes_of_a_job(trainer: Trainer, reference: Path) -> None:
    """Slurm signals training processes and data-loading workers."""
    folder, options = trainer.top / "terminated", [LONG, "data.workers=1"]
    process = trainer.start(folder, *options, "run.log_every=1")
    wait_until(lambda: (folder / "metrics.jsonl").exists(), [process])
    os.killpg(process.pid, signal.SIGTERM)  # type: ignore[arg-type]
    assert status(process) == 143, trainer.output(folder)
    assert "Received SIGTERM: stopped after step" in trainer.output(folder)
    assert "Rerun the same command to resume." in trainer.output(folder)
    stopped = newest_step(folder)
    assert trainer.train(folder, *options) == 0, trainer.output(folder)
    assert f"(step {stopped}/150)" in trainer.output(folder)
    assert_same_weights(folder, reference)


def test_full_disk_while_saving_does_not_stop_training_and_is_reported(trainer: Trainer, reference: Path) -> None:
    """A shard of this model takes 342 kB, its weights 110 kB."""
    folder = trainer.top / "full"
    process = trainer.start(folder, LONG, "run.save_every=10")
    wait_until(lambda: newest_step(folder) >= 20, [process])
    process.terminate()
    assert status(process) == 143
    before = list_checkpoints(folder / "checkpoints")
    assert trainer.train(folder, LONG, "run.save_every=10", largest_file=200_000) == 0, trainer.output(folder)
    output = trainer.output(folder)
    assert "could not be saved: " in output
    assert "0.1 MB are missing" in output
    assert "Training continues." in output
    assert list_checkpoints(folder / "checkpoints") == before
    assert all(checkpoint_error(checkpoint) is None for checkpoint in before)
    assert not is_saving(folder), "partial checkpoints take no disk space"
    assert_same_weights(folder, reference)


def test_full_disk_for_final_weights_is_reported_and_fixed_by_a_rerun(trainer: Trainer) -> None:
    folder = trainer.top / "no-room"
    assert trainer.train(folder, "schedule.steps=3", largest_file=50_000) == 2
    assert "model.safetensors could not be written" in trainer.output(folder)
    assert "Traceback" not in trainer.output(folder)
    assert trainer.train(folder, "schedule.steps=3") == 0
    assert (folder / "model.safetensors").exists()


def test_diverged_run_stops_with_its_numbers_and_resumes_from_before(trainer: Trainer, reference: Path) -> None:
    folder = trainer.top / "poisoned"
    options = [LONG, "run.max_skipped_steps=7", "run.log_every=1", "run.save_every=2", "run.keep=1"]
    assert trainer.train(folder, *options, poison_from=9) == 2
    output = trainer.output(folder)
    assert "non-finite loss or gradient for 7 consecutive steps (10-16): learning rate" in output
    assert "gradient norm nan (last finite:" in output
    assert "weight norm" in output
    assert "last checkpoint from before it: " in output
    assert "Traceback" not in output
    good = folder / "checkpoints" / "step-00000008"
    assert f"{good}." in output
    assert checkpoint_error(good) is None
    kept = load_file(good / "model.safetensors")
    last = load_file(folder / "checkpoints" / "step-00000014" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in last.values())
    assert kept.keys() == last.keys()
    assert trainer.train(folder, *options, f"run.resume={good}") == 0, trainer.output(folder)
    assert_same_weights(folder, reference)
