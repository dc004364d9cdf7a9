"""Training that differs from fp32 on one process, or that does not resume bit-exactly, is found."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from vit_scale.doctor.check import Setup
from vit_scale.doctor.checks import training
from vit_scale.errors import UserError
from vit_scale.tasks.classify.classification import Classification
from vit_scale.train.run_recipe import Outcome


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scratch directory in which fp32 on one process has been trained."""
    scratch = tmp_path_factory.mktemp("doctor")
    found = training.reference(Setup(str(scratch)))
    assert (found.status, len(found.numbers["train/loss"])) == ("works", training.STEPS)
    return scratch


@pytest.fixture
def trained(reference: Path, tmp_path: Path) -> Setup:
    """A copy of it, for a test to change."""
    shutil.copytree(reference / "training", tmp_path / "training")
    return Setup(str(tmp_path))


def test_single_process_equals_the_reference(trained: Setup) -> None:
    found = training.training(trained, "single", "fp32")
    assert found.status == "works"
    assert found.numbers["loss_difference"] == 0


def test_other_losses_are_broken(monkeypatch: pytest.MonkeyPatch, trained: Setup) -> None:
    right = Classification.loss
    monkeypatch.setattr(Classification, "loss", lambda *args: {"loss": 1.01 * right(*args)["loss"]})
    found = training.training(trained, "single", "fp32")
    assert (found.status, found.required) == ("broken", True)
    assert "from fp32 on one process" in found.value


def test_resumed_run_with_other_weights_is_broken(monkeypatch: pytest.MonkeyPatch, trained: Setup) -> None:
    train = training._train

    def forgetful(setup: Setup, folder: Path, *options: Any, resume: str = "auto") -> None:
        train(setup, folder, *options)
        if resume != "auto":
            weights = load_file(folder / "model_ema.safetensors")
            weights["head.bias"][0] += 1e-7
            save_file(weights, folder / "model_ema.safetensors")

    monkeypatch.setattr(training, "_train", forgetful)
    found = training.training(trained, "single", "fp32")
    assert (found.status, found.value) == (
        "broken",
        "a resumed run has other weights: 1 of 36 tensors in model_ema.safetensors",
    )


def test_reference_that_is_not_finite_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    found = {"train/loss": [1.0, math.nan], "train/grad_norm": [1.0, 1.0]}
    monkeypatch.setattr(training, "_train", lambda *_: None)
    monkeypatch.setattr(training, "_metrics", lambda folder: found)
    assert training.reference(setup).status == "broken"


def test_run_that_stops_is_an_error(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(training, "train_recipe", lambda *_: Outcome(75, None))
    with pytest.raises(RuntimeError, match="ended with status 75"):
        training.training(with_reference(setup), "single", "fp32")


def with_reference(setup: Setup) -> Setup:
    folder = Path(setup.scratch) / "training" / training.REFERENCE
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    return setup


def test_what_the_machine_cannot_train_is_skipped(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    assert training.training(setup, "single", "fp16").value == "not supported on a CPU"
    assert training.training(setup, "single", "fp32").value == "there is no fp32 run on one process to compare with"
    assert training.training(dataclasses.replace(setup, gpus=1), "ddp", "fp32").value == "one GPU"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert training.training(setup, "zero2", "fp32").value == "DeepSpeed is not installed"

    def refuse(*_: Any) -> None:
        raise UserError("parallel.precision = 'bf16': a bf16 matmul crashes on this CPU (illegal instruction).\nSet X.")

    monkeypatch.setattr(training, "resolve_precision", refuse)
    found = training.training(setup, "single", "bf16")
    assert (found.status, found.value) == ("skipped", "a bf16 matmul crashes on this CPU (illegal instruction)")


def test_differences_are_the_largest_and_count_missing_and_non_finite_steps() -> None:
    one = {"train/loss": [2.0, 1.0], "train/grad_norm": [4.0, 2.0]}
    other = {"train/loss": [2.1, 0.8], "train/grad_norm": [4.0, 2.2]}
    assert training.differences(other, one) == pytest.approx((0.2, 0.1))
    assert training.differences({"train/loss": [2.0], "train/grad_norm": [4.0]}, one) == (math.inf, math.inf)
    not_finite = {"train/loss": [2.0, 1.0], "train/grad_norm": [math.nan, 2.0]}
    assert training.differences(not_finite, one) == (0.0, math.inf)


@pytest.mark.parametrize("gpus", [0, 1, 3, 8, 24])
def test_global_batch_is_the_same_on_one_rank_and_on_all(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, gpus: int
) -> None:
    batches = []

    def keep(config: Any, name: str) -> Outcome:
        batches.append((config.batch.global_, config.batch.micro))
        return Outcome(0, None)

    monkeypatch.setattr(training, "train_recipe", keep)
    setup = dataclasses.replace(setup, gpus=gpus)
    for world in (1, setup.processes):
        monkeypatch.setattr(training, "world_size", lambda world=world: world)
        training._train(setup, Path("none"), "ddp", "fp32")
    (one, micro_one), (every, micro_every) = batches
    assert one == every == 2 * micro_one == 2 * micro_every * setup.processes
