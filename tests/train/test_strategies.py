"""One recipe, any strategy, any number of processes: the same losses and weights, interrupted or not.

Three launches do all the work: one process, then two (gloo on CPUs), then one again. The tests read what they wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import run_script
from vit_scale.models import create_model

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
    "track.attention_every=10",
]
HALF_STRATEGIES = ["zero2", "zero3"]  # ZeRO-1 holds its weights as ZeRO-2 does
EXACT = [*COMMON, "model.drop_path=0"]  # its draws belong to a forward pass, so they differ with the processes
QUICK_EVALUATION = ["run.eval_images=100", "track.images=never"]
EVERYTHING = [*COMMON, *QUICK_EVALUATION, "model.dropout=0.1", "model.drop_path=0.3", "optim.layer_decay=0.8"]
# Half of the model is frozen, with everything that frozen parts must not do, and the classes are weighted and balanced.
FROZEN = [*EXACT, "model.freeze=1", "model.layer_scale=1e-4", "parallel.activation_checkpointing=full"]
FROZEN += ["optim.class_weights=[1,2,3,4,5,6,7,8,9,10]", "data.balance=true", *QUICK_EVALUATION]
INTERRUPTED, OUTPUT_CLOSED = 138, 141


def job(folder: Path, options: list[str], *more: str, **wrong: object) -> dict:
    return {"recipe": "recipes/debug.yaml", "options": [*options, f"run.dir={folder}", *more], **wrong}


def launch(processes: int, jobs: list[dict]) -> str:
    # Some CPUs that advertise AMX crash in a bf16 matmul; without AMX they compute it.
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    worker = "tests/workers/train_many.py"
    done = run_script(worker, json.dumps(jobs), processes=processes, timeout=400, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """The directory with all runs, and the output of each launch."""
    top = tmp_path_factory.mktemp("strategies")
    first = [
        job(top / "one", EXACT),
        job(top / "one-resumed", EXACT, signal_at=6),
        job(top / "one-resumed", EXACT),
        job(top / "one-two-one", EXACT, signal_at=6),
        job(top / "one-recomputed", EXACT, "parallel.activation_checkpointing=full"),
        job(top / "one-compiled", EXACT, "parallel.compile=true"),
        job(top / "one-frozen", FROZEN),
        job(top / "one-frozen-resumed", FROZEN, signal_at=6),
        job(top / "one-frozen-resumed", FROZEN),
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
            job(top / f"{strategy}-frozen", FROZEN, chosen, signal_at=6),
            job(top / f"{strategy}-frozen", FROZEN, chosen),
        ]
        two += [job(top / f"{strategy}-stopped", EVERYTHING, chosen, "batch.eval=16", signal_in_evaluation=2)]
        two += [job(top / f"{strategy}-stopped", EVERYTHING, chosen, "batch.eval=16")]
    two += [job(top / "closed", EXACT, "parallel.strategy=ddp", closed_at=4)]
    two += [job(top / "mixed", EXACT, "parallel.strategy=ddp", signal_at=4)]
    two += [job(top / "mixed", EXACT, "parallel.strategy=zero2", signal_at=9)]
    two += [job(top / "mixed", EXACT, "parallel.strategy=zero3", signal_at=14)]
    two += [job(top / "mixed", EXACT, "parallel.strategy=ddp")]
    two += [job(top / "one-two-one", EXACT, signal_at=13)]
    half = "parallel.precision=bf16"
    two += [job(top / "ddp-bf16", EXACT, "parallel.strategy=ddp", half)]
    for strategy in HALF_STRATEGIES:
        chosen = f"parallel.strategy={strategy}"
        two += [job(top / f"{strategy}-bf16", EXACT, chosen, half)]
        two += [job(top / f"{strategy}-bf16-resumed", EXACT, chosen, half, signal_at=6)]
        two += [job(top / f"{strategy}-bf16-resumed", EXACT, chosen, half)]
    last = [job(top / "one-two-one", EXACT)]
    return top, {1: launch(1, first), 2: launch(2, two), 3: launch(1, last)}


def metrics(folder: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def assert_same_run(ours: Path, theirs: Path, tolerance: float) -> None:
    for key in ("train/loss", "val/loss", "val_ema/loss", "val/top1", "val_ema/attention_distance_block1"):
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
    for name in ("batch", "mistakes", "attention", "attention_overview"):
        assert (ours / "pictures" / f"{name}.png").exists()


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_zero_equals_ddp_with_everything_on(runs: tuple, strategy: str) -> None:
    assert_same_run(runs[0] / f"{strategy}-all", runs[0] / "ddp-all", 1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_is_bit_identical(runs: tuple, strategy: str) -> None:
    assert_same_run(runs[0] / f"{strategy}-resumed", runs[0] / f"{strategy}-all", 0.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_after_a_signal_to_one_rank_during_an_evaluation_is_bit_identical(runs: tuple, strategy: str) -> None:
    assert "stopped after step 10, before its evaluation." in runs[1][2]
    assert len(metrics(runs[0] / f"{strategy}-stopped", "val/loss")) == 2
    assert_same_run(runs[0] / f"{strategy}-stopped", runs[0] / f"{strategy}-all", 0.0)


def test_resume_of_one_process_is_bit_identical(runs: tuple) -> None:
    assert_same_run(runs[0] / "one-resumed", runs[0] / "one", 0.0)
    assert_same_run(runs[0] / "one-frozen-resumed", runs[0] / "one-frozen", 0.0)


@pytest.mark.parametrize("way", ["recomputed", "compiled"])
def test_recomputed_and_compiled_blocks_are_the_same_run(runs: tuple, way: str) -> None:
    assert_same_run(runs[0] / f"one-{way}", runs[0] / "one", 1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_weighted_and_balanced_run_equals_one_process_also_resumed(runs: tuple, strategy: str) -> None:
    assert_same_run(runs[0] / f"{strategy}-frozen", runs[0] / "one-frozen", 1e-4)


@pytest.mark.parametrize("strategy", ["one", *STRATEGIES])
def test_frozen_weights_stay_as_they_were_and_are_in_both_files(runs: tuple, strategy: str) -> None:
    torch.manual_seed(0)
    initial = create_model("vit_mu", img_size=8, patch_size=2, layer_scale=1e-4, in_chans=1).state_dict()
    for name in ("model", "model_ema"):
        weights = load_file(runs[0] / f"{strategy}-frozen" / f"{name}.safetensors")
        unchanged = {key for key, value in weights.items() if torch.equal(value, initial[key])}
        assert unchanged == {key for key in initial if not key.startswith(("blocks.1.", "norm.", "head."))}


@pytest.fixture
def half_precision_runs(runs: tuple) -> Path:
    if not (runs[0] / "ddp-bf16").exists():
        pytest.skip("this CPU has no bf16")
    return runs[0]


def test_half_precision_follows_full_precision(half_precision_runs: Path) -> None:
    ours, theirs = (metrics(half_precision_runs / name, "train/loss") for name in ("ddp-bf16", "one"))
    assert ours == pytest.approx(theirs, abs=1e-2)


@pytest.mark.parametrize("strategy", HALF_STRATEGIES)
def test_half_precision_under_zero_equals_ddp(half_precision_runs: Path, strategy: str) -> None:
    assert_same_run(half_precision_runs / f"{strategy}-bf16", half_precision_runs / "ddp-bf16", 1e-4)
    weights = load_file(half_precision_runs / f"{strategy}-bf16" / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.float32}


@pytest.mark.parametrize("strategy", HALF_STRATEGIES)
def test_resume_in_half_precision_is_bit_identical(half_precision_runs: Path, strategy: str) -> None:
    names = (f"{strategy}-bf16-resumed", f"{strategy}-bf16")
    assert_same_run(*(half_precision_runs / name for name in names), tolerance=0.0)


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
    half = len(HALF_STRATEGIES) * (runs[0] / "ddp-bf16").exists()
    assert sum(statuses == {str(INTERRUPTED)} for statuses in by_job.values()) == 3 * len(STRATEGIES) + 4 + half
    assert sum(statuses == {str(OUTPUT_CLOSED)} for statuses in by_job.values()) == 1
    assert "Received SIGUSR1: stopped after step" in runs[1][2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_non_finite_gradient_of_one_rank_is_skipped_by_all(runs: tuple, strategy: str) -> None:
    folder = runs[0] / f"{strategy}-poisoned"
    assert metrics(folder, "train/skipped_steps")[-1] == 2
    for name in ("model", "model_ema"):
        assert all(t.isfinite().all() for t in load_file(folder / f"{name}.safetensors").values())
    assert [loss is None for loss in metrics(folder, "train/loss")] == [False, False, True, True, False, False]
    assert metrics(folder, "val/loss") == pytest.approx(metrics(runs[0] / "ddp-poisoned", "val/loss"), abs=1e-4)
