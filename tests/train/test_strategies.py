"""One recipe, any strategy, any number of processes: the same losses and weights, interrupted or not.

Three launches do all the work: one process, then two (gloo on CPUs), then one again. The tests read what they wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
COMMON = [
    "track.wandb=disabled",
    "data.workers=0",
    "schedule.steps=20",
    "batch.micro=8",
    "optim.clip_norm=0.5",
    "run.log_every=1",
    "run.eval_every=10",
    "run.save_every=100",
]
EXACT = [*COMMON, "model.drop_path=0"]  # its draws belong to a forward pass, so they differ with the processes
EVERYTHING = [*COMMON, "model.dropout=0.1", "model.drop_path=0.3", "optim.layer_decay=0.8"]
INTERRUPTED = 138


def job(folder: Path, options: list[str], *more: str, **wrong: object) -> dict:
    return {"recipe": "recipes/debug.yaml", "options": [*options, f"run.dir={folder}", *more], **wrong}


def launch(root: Path, processes: int, jobs: list[dict]) -> str:
    command = [sys.executable, "tests/workers/train_many.py", json.dumps(jobs)]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*launcher, *command[1:]]
    # Some CPUs that advertise AMX crash in a bf16 matmul; without AMX they compute it.
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """The directory with all runs, and the output of each launch."""
    top = tmp_path_factory.mktemp("strategies")
    first = [
        job(top / "one", EXACT),
        job(top / "one-resumed", EXACT, signal_at=6),
        job(top / "one-resumed", EXACT),
        job(top / "one-two-one", EXACT, signal_at=6),
        job(top / "one-recomputed", EXACT, "parallel.activation_checkpointing=full"),
        job(top / "one-compiled", EXACT, "parallel.compile=true"),
    ]
    two = []
    for strategy in STRATEGIES:
        chosen = f"parallel.strategy={strategy}"
        two += [
            job(top / strategy, EXACT, chosen),
            job(top / f"{strategy}-all", EVERYTHING, chosen),
            job(top / f"{strategy}-resumed", EVERYTHING, chosen, signal_at=6),
            job(top / f"{strategy}-resumed", EVERYTHING, chosen),
            job(top / f"{strategy}-poisoned", EXACT, chosen, "schedule.steps=6", poison_at=[2, 3]),
        ]
    two += [job(top / "mixed", EXACT, "parallel.strategy=ddp", signal_at=4)]
    two += [job(top / "mixed", EXACT, "parallel.strategy=zero2", signal_at=9)]
    two += [job(top / "mixed", EXACT, "parallel.strategy=zero3", signal_at=14)]
    two += [job(top / "mixed", EXACT, "parallel.strategy=ddp")]
    two += [job(top / "one-two-one", EXACT, signal_at=13)]
    two += [job(top / "bf16", EXACT, "parallel.strategy=zero2", "parallel.precision=bf16")]
    last = [job(top / "one-two-one", EXACT)]
    return top, {1: launch(root, 1, first), 2: launch(root, 2, two), 3: launch(root, 1, last)}


def metrics(folder: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def assert_same_run(ours: Path, theirs: Path, tolerance: float) -> None:
    for key in ("train/loss", "val/loss", "val_ema/loss", "val/top1"):
        assert metrics(ours, key) == pytest.approx(metrics(theirs, key), abs=max(tolerance, 1e-12)), key
    for name in ("model", "model_ema"):
        mine, other = (load_file(folder / f"{name}.safetensors") for folder in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_equal_one_with_the_same_global_batch(runs: tuple, strategy: str) -> None:
    assert_same_run(runs[0] / strategy, runs[0] / "one", 1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norms_tables_and_images_equal_one_process(runs: tuple, strategy: str) -> None:
    ours, theirs = runs[0] / strategy, runs[0] / "one"
    for key in ("train/grad_norm", "train/param_norm", "train/update_norm"):
        assert metrics(ours, key) == pytest.approx(metrics(theirs, key), rel=1e-3), key
    assert min(metrics(ours, "train/update_norm")) > 0
    mine, other = (json.loads((folder / "tables/confusion.json").read_text())["rows"] for folder in (ours, theirs))
    assert sum(map(sum, mine)) == sum(map(sum, other)), "each image is counted once"
    assert mine == other
    for name in ("batch", "mistakes", "attention"):
        assert (ours / "pictures" / f"{name}.png").exists()


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_zero_equals_ddp_with_everything_on(runs: tuple, strategy: str) -> None:
    assert_same_run(runs[0] / f"{strategy}-all", runs[0] / "ddp-all", 1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_is_bit_identical(runs: tuple, strategy: str) -> None:
    assert_same_run(runs[0] / f"{strategy}-resumed", runs[0] / f"{strategy}-all", 0.0)


def test_resume_of_one_process_is_bit_identical(runs: tuple) -> None:
    assert_same_run(runs[0] / "one-resumed", runs[0] / "one", 0.0)


@pytest.mark.parametrize("way", ["recomputed", "compiled"])
def test_recomputed_and_compiled_blocks_are_the_same_run(runs: tuple, way: str) -> None:
    assert_same_run(runs[0] / f"one-{way}", runs[0] / "one", 1e-4)


def test_half_precision_under_zero_follows_full_precision(runs: tuple) -> None:
    if not (runs[0] / "bf16").exists():
        pytest.skip("this CPU has no bf16")
    assert metrics(runs[0] / "bf16", "train/loss") == pytest.approx(metrics(runs[0] / "one", "train/loss"), abs=1e-2)
    weights = load_file(runs[0] / "bf16" / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.float32}, (
        "the master weights are saved, not the half-precision copies"
    )


def test_changing_the_strategy_keeps_the_run(runs: tuple) -> None:
    assert_same_run(runs[0] / "mixed", runs[0] / "one", 1e-4)


def test_changing_the_number_of_processes_keeps_the_run(runs: tuple) -> None:
    assert_same_run(runs[0] / "one-two-one", runs[0] / "one", 1e-4)


def test_signal_to_one_rank_stops_all_after_the_same_step(runs: tuple) -> None:
    lines = [line.split() for line in runs[1][2].splitlines() if line.startswith("status")]
    by_job: dict[str, set[str]] = {}
    for _, _, number, status in lines:
        by_job.setdefault(number, set()).add(status)
    assert all(len(statuses) == 1 for statuses in by_job.values()), "processes disagree"
    assert sum(statuses == {str(INTERRUPTED)} for statuses in by_job.values()) == len(STRATEGIES) + 4
    assert "Received SIGUSR1: stopped after step" in runs[1][2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_non_finite_gradient_of_one_rank_is_skipped_by_all(runs: tuple, strategy: str) -> None:
    folder = runs[0] / f"{strategy}-poisoned"
    assert metrics(folder, "train/skipped_steps")[-1] == 2
    for name in ("model", "model_ema"):
        assert all(t.isfinite().all() for t in load_file(folder / f"{name}.safetensors").values())
    assert [loss is None for loss in metrics(folder, "train/loss")] == [False, False, True, True, False, False]
    assert metrics(folder, "val/loss") == pytest.approx(metrics(runs[0] / "ddp-poisoned", "val/loss"), abs=1e-4)
