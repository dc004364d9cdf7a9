"""Each kind of attention trains through its recipe: two processes equal one, under every strategy, resumed or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vit_scale
from tests.processes import run_script

# Small models on digits, 4 x 4 patches; draws of dropout and stochastic depth belong to a forward pass.
OPTIONS = [
    *("data.source=embedded:digits", "data.workers=0", "track.wandb=disabled", "track.images=never"),
    *("model.embed_dim=32", "model.depth=3", "model.num_heads=2", "model.img_size=8", "model.dropout=0"),
    *("model.drop_path=0", "schedule.steps=50", "schedule.warmup_epochs=0.1", "batch.global=16", "batch.micro=8"),
    *("run.eval_images=64", "run.eval_every=50", "run.save_every=100", "run.log_every=5"),
]
WINDOW, LINEAR = "recipes/cifar10/window.yaml", "recipes/cifar10/linear.yaml"
KINDS = {
    "window": (WINDOW, ["model.window=2"]),
    "dilated": (WINDOW, ["model.attention=dilated", "model.window=null", "model.dilation=2"]),
    "block": (WINDOW, ["model.attention=block", "model.window=1", "model.pos_embed=relative"]),
    "linear": (LINEAR, []),
}
STRATEGIES = {"window": "zero3", "dilated": "ddp", "block": "zero3", "linear": "zero3"}


def job(folder: Path, kind: str, *more: str, **wrong: object) -> dict:
    recipe, options = KINDS[kind]
    return {"recipe": recipe, "options": [*OPTIONS, *options, f"run.dir={folder}", *more], **wrong}


def launch(processes: int, jobs: list[dict]) -> None:
    done = run_script("tests/workers/train_many.py", json.dumps(jobs), processes=processes, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("kinds")
    ones = [job(top / f"{kind}-one", kind) for kind in KINDS]
    ones += [job(top / "window-recomputed", "window", "parallel.activation_checkpointing=full")]
    ones += [job(top / "linear-resumed", "linear", signal_at=20), job(top / "linear-resumed", "linear")]
    launch(1, ones)
    launch(2, [job(top / f"{kind}-two", kind, f"parallel.strategy={STRATEGIES[kind]}") for kind in KINDS])
    return top


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_on_two_processes_equal_one(runs: Path, kind: str) -> None:
    one, two = runs / f"{kind}-one", runs / f"{kind}-two"
    assert len(losses(one)) >= 10
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (two, one))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_linear_attention_keeps_its_features_when_resumed_and_loaded(runs: Path) -> None:
    one, resumed = (load_file(runs / name / "model.safetensors") for name in ("linear-one", "linear-resumed"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in one.items())
    loaded = vit_scale.load_run(runs / "linear-one").model
    for index, block in enumerate(loaded.blocks):
        assert torch.equal(block.attn.random_features, one[f"blocks.{index}.attn.random_features"])
        assert block.attn.random_features.any()


def test_recomputed_activations_change_no_bit(runs: Path) -> None:
    assert losses(runs / "window-recomputed") == losses(runs / "window-one")
