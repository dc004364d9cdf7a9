"""ZeRO-3 never holds a full model on a rank, and starts from the weights of any other strategy: two processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors.torch import save_file

import vit_scale
from tests.processes import run_script

WIDE = ["model.embed_dim=192", "model.num_heads=3"]
SHALLOW, DEEP = "2 blocks", "8 blocks"
FP32 = 4
MODELS = {
    SHALLOW: [*WIDE, "model.depth=2"],
    DEEP: [*WIDE, "model.depth=8"],
    "jax init": ["model.init=jax"],
    "timm init": ["model.init=timm", "model.pos_embed=learned_2d", "model.registers=2"],
    "timm model": [
        "model.name=timm/vit_tiny_patch16_224",
        "model.patch_size=null",
        "model.img_size=32",
        "model.layer_scale=null",
    ],
    "resampled weights": ["model.name=vit_mu", "model.img_size=8", "model.patch_size=2"],
}
Measured = dict[tuple[str, str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Measurements by strategy, model and rank."""
    weights = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(vit_scale.create_model("vit_mu", img_size=16, patch_size=2, in_chans=1).state_dict(), weights)
    models = MODELS | {"resampled weights": [*MODELS["resampled weights"], f"model.weights={weights}"]}
    cases = [{"strategy": s, "model": model, "options": models[model]} for s in ("ddp", "zero3") for model in models]
    cases += [{"strategy": "zero2", "model": model, "options": models[model]} for model in (SHALLOW, DEEP)]
    done = run_script("tests/workers/sharded_memory.py", json.dumps(cases), processes=2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("memory")]
    found = [(int(rank), json.loads(numbers)) for _, rank, numbers in lines]
    return {(numbers["strategy"], numbers["model"], rank): numbers for rank, numbers in found}


def growth(measured: Measured, strategy: str, rank: int, key: str) -> float:
    """Return how many bytes `key` grows per byte of added parameters."""
    shallow, deep = (measured[strategy, model, rank] for model in (SHALLOW, DEEP))
    return (deep[key] - shallow[key]) / (FP32 * (deep["params"] - shallow["params"]))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_keeps_half_of_the_parameters(measured: Measured, rank: int) -> None:
    numbers = measured["zero3", DEEP, rank]
    assert numbers["held"] == pytest.approx(numbers["params"] / 2, rel=0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_building_never_holds_the_full_model(measured: Measured, rank: int) -> None:
    assert growth(measured, "ddp", rank, "build") == pytest.approx(1.0, abs=0.05)
    assert growth(measured, "zero3", rank, "build") < 0.7


@pytest.mark.parametrize("rank", [0, 1])
def test_model_built_in_host_memory_is_moved_to_the_device_in_shards(measured: Measured, rank: int) -> None:
    numbers = measured["zero3", "timm model", rank]
    assert numbers["build"] > FP32 * numbers["params"], "timm initializes complete models"
    assert numbers["place"] < FP32 * (0.5 * numbers["params"] + numbers["largest"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("strategy", "limit"),
    [
        ("zero2", 1 + 1 / 4 + (1 + 2 + 1 + 1) / 2),  # flat weights, a bucket; half of: weights, moments, gradients, EMA
        ("zero3", (1 + 2 + 1 + 1) / 2 + 1 / 4),
    ],
)
def test_starting_a_run_needs_no_more_than_a_step(measured: Measured, strategy: str, limit: float, rank: int) -> None:
    assert growth(measured, "ddp", rank, "start") > 5, "moments, gradients, their buckets, reserved memory, EMA"
    assert growth(measured, strategy, rank, "start") < limit


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_saving_holds_one_full_tensor_at_a_time(measured: Measured, strategy: str, rank: int) -> None:
    numbers = measured[strategy, DEEP, rank]
    assert growth(measured, strategy, rank, "save") == pytest.approx(0.0, abs=0.01)
    assert numbers["save"] < 1.1 * FP32 * numbers["largest"]


@pytest.mark.parametrize("model", MODELS)
def test_sharded_initial_weights_are_bit_identical(measured: Measured, model: str) -> None:
    assert measured["zero3", model, 0]["checksum"] == measured["ddp", model, 0]["checksum"] != 0
