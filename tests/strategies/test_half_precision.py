"""Half precision is the same computation under every strategy, on two processes: losses, gradients, skipped steps.

The bound: losses to 1e-6, and the gradient of the whole model to 1e-4. Single tensors of ZeRO-3 differ by one rounding
to bf16 (2^-8), as it sums biases in another order. Half-precision weights would differ by 0.7% in the gradient, and
lose what the blocks add to the residual stream: see docs/scaling.md.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import run_script

ZERO = ["zero1", "zero2", "zero3"]
FOUR_MICRO_BATCHES = ["model.drop_path=0", "batch.global=16", "batch.micro=2"]
MODELS = {
    # ViT-L, with narrower MLPs and few tokens.
    "large": [
        *("model.name=vit_large_patch16_224", "model.patch_size=16", "model.img_size=32", "model.mlp_ratio=0.25"),
        *("model.drop_path=0", "model.layer_scale=1e-4", "batch.global=4", "batch.micro=1"),
    ],
    # An odd number of parameters, and position embeddings in a buffer.
    "odd": [*FOUR_MICRO_BATCHES, "model.num_classes=37", "model.pos_embed=sincos"],
    "recomputed": [*FOUR_MICRO_BATCHES, *("model.num_classes=37", "model.pos_embed=sincos")]
    + ["parallel.activation_checkpointing=full"],
    "offloaded": [*FOUR_MICRO_BATCHES, *("model.num_classes=37", "model.pos_embed=sincos")]
    + ["parallel.offload=optimizer"],
    "batch norm": [
        *("model.name=timm/resnet18", "model.patch_size=null", "model.img_size=32", "model.layer_scale=null"),
        *("model.drop_path=0", "batch.global=16", "batch.micro=8"),
    ],
}
Measured = dict[tuple[str, str, str, int], dict[str, Any]]


def case(model: str, strategy: str, precision: str, like: str) -> dict[str, Any]:
    name = f"{model} {strategy} {precision}"
    return {
        "name": name,
        "like": like,
        "model": model,
        "strategy": strategy,
        "precision": precision,
        "options": MODELS[model],
        "gradient_only": model == "large",
    }


def all_cases() -> list[dict[str, Any]]:
    cases = []
    for model in ("large", "odd", "batch norm"):
        # ZeRO-1 computes a step of a large model as ZeRO-2 does.
        strategies = ("ddp", *ZERO) if model != "large" else ("ddp", *ZERO[1:])
        cases += [case(model, strategy, "bf16", f"{model} ddp bf16") for strategy in strategies]
    cases += [case("recomputed", "zero3", "bf16", "odd ddp bf16")]
    cases += [case("offloaded", strategy, "bf16", "odd ddp bf16") for strategy in ("zero1", "zero3")]
    # DDP has no fp16 on a CPU.
    cases += [case("odd", "ddp", "fp32", "odd ddp fp32")]
    return cases + [case("odd", strategy, "fp16", "odd ddp fp32") for strategy in ZERO]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """Measurements by model, strategy, precision and rank."""
    # Some CPUs that advertise AMX crash in a bf16 matmul; without AMX they compute it.
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = run_script("tests/workers/gradients.py", json.dumps(all_cases()), processes=2, timeout=400, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("gradients")]
    found = [(int(rank), json.loads(numbers)) for _, rank, numbers in lines]
    return {(case["model"], case["strategy"], case["precision"], rank): case for rank, case in found}


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (model, strategy)
        for model in ("large", "odd", "batch norm")
        for strategy in ZERO
        if model != "large" or "1" not in strategy
    ],
)
def test_bf16_equals_ddp_over_several_micro_batches(measured: Measured, model: str, strategy: str) -> None:
    for rank in (0, 1):
        ours, theirs = (measured[model, name, "bf16", rank] for name in (strategy, "ddp"))
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
    assert measured[model, strategy, "bf16", 0]["error"] < 1e-4
    assert measured[model, strategy, "bf16", 0]["worst"] < 2**-8


@pytest.mark.parametrize(
    ("model", "strategy"), [("recomputed", "zero3"), ("offloaded", "zero1"), ("offloaded", "zero3")]
)
def test_recomputing_and_offloading_change_nothing_in_bf16(measured: Measured, model: str, strategy: str) -> None:
    for rank in (0, 1):
        ours = measured[model, strategy, "bf16", rank]
        assert ours["loss"] == pytest.approx(measured["odd", "ddp", "bf16", rank]["loss"], rel=1e-6)
    assert measured[model, strategy, "bf16", 0]["error"] < 1e-4


@pytest.mark.parametrize("strategy", ZERO)
def test_fp16_follows_fp32(measured: Measured, strategy: str) -> None:
    assert measured["odd", strategy, "fp16", 0]["error"] < 2**-9
    for rank in (0, 1):
        assert measured["odd", strategy, "fp16", rank]["scales"] == [2.0**16, 2.0**15], "halved by an overflow"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ZERO)
def test_infinite_gradient_of_one_rank_is_skipped_by_all(measured: Measured, strategy: str, precision: str) -> None:
    assert all(measured["odd", strategy, precision, rank]["is_skipped"] for rank in (0, 1))


@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.parametrize("model", ["odd", "batch norm"])
def test_weights_and_buffers_are_saved_in_fp32(measured: Measured, model: str, strategy: str) -> None:
    assert measured[model, strategy, "bf16", 0]["saved"] == ["torch.float32"]


def test_zero3_keeps_no_copy_of_the_model_for_the_backward_pass(measured: Measured) -> None:
    assert measured["odd", "zero2", "bf16", 0]["copies"] > 0.9, "autograd saves the casts of autocast"
    assert measured["odd", "zero3", "bf16", 0]["copies"] < 0.1, "the last block uses parts of a layer"
