"""A task whose model is a backbone with further layers trains, resumes and reports like any other."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import vit_scale
from tests.processes import run_script
from vit_scale.checkpoints.run_weights import find_run_weights
from vit_scale.cost.count import count_model
from vit_scale.cost.meta import build_on_meta
from vit_scale.cost.training import CostPart
from vit_scale.models import create_model
from vit_scale.recipe import build_config
from vit_scale.report.model_report import report_on

SCRIPT = Path(__file__).parent / "patch_pixels.py"
BACKBONE = {"img_size": 8, "patch_size": 2, "pool": "tokens", "num_classes": 0, "in_chans": 1}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("patch_pixels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PIXELS = load_script()


def train(folder: Path, *options: str) -> Path:
    vit_scale.train(PIXELS.RECIPE, [f"run.dir={folder}", *options], task=PIXELS.PatchPixels)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from its first to its last step."""
    return train(tmp_path_factory.mktemp("composite") / "run")


def assert_same_weights(one: Path, other: Path, **tolerance: float) -> None:
    for file in (f"{name}.safetensors" for name in ("model", "model_ema", "rest", "rest_ema")):
        torch.testing.assert_close(load_file(one / file), load_file(other / file), **tolerance)


def weights_of(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The final weights of a run under the names of the composite."""
    return find_run_weights(folder, kind).read()  # type: ignore[arg-type]


def test_composite_learns_and_all_its_parameters_are_counted(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    weights = weights_of(run, "raw")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["params"] == sum(tensor.numel() for tensor in weights.values())
    assert {name.split(".")[0] for name in weights} == {"backbone", "decoder"}
    assert {name.split(".")[0] for name in load_file(run / "rest.safetensors")} == {"decoder"}
    assert "blocks.0.norm1.weight" in load_file(run / "model.safetensors"), "timm's names"


def test_composite_resumes_bit_for_bit(run: Path, tmp_path: Path) -> None:
    train(tmp_path / "resumed", "schedule.steps=4")
    train(tmp_path / "resumed")
    assert_same_weights(run, tmp_path / "resumed", rtol=0, atol=0)


def test_composite_trains_with_muon_checkpointing_and_backbone_weights(run: Path, tmp_path: Path) -> None:
    """The weights of a composite initialize the backbone of another one."""
    options = ["optim.name=muon", "parallel.activation_checkpointing=full", f"model.weights={run}", "optim.lr=1e-9"]
    weights = weights_of(train(tmp_path / "muon", "schedule.steps=1", *options), "raw")
    before = weights_of(run, "ema")
    for name in weights:
        same = torch.allclose(weights[name], before[name], rtol=0, atol=1e-6)
        assert same == name.startswith("backbone."), name


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs under ZeRO-3: with micro-batches of 16, of 8, and of 8 after trials of 16 that failed."""
    top = tmp_path_factory.mktemp("sharded")
    worker = "tests/workers/failed_trial.py"
    scripts = [
        [str(SCRIPT), top / "whole"],
        [str(SCRIPT), top / "halves", "batch.micro=8"],
        [worker, "loss", top / "loss"],
        [worker, "block", top / "block"],
    ]
    for script, *arguments in scripts:
        done = run_script(script, *arguments, "parallel.strategy=zero3")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        if script == worker:
            assert "gathered 0\n" in done.stdout, "a failed trial shards all weights again"
            assert "batch.micro = 16 does not fit in memory: using 8" in done.stdout
    return top


def test_composite_has_the_same_weights_under_zero3(run: Path, sharded: Path) -> None:
    assert_same_weights(run, sharded / "whole", rtol=0, atol=1e-5)


@pytest.mark.parametrize("where", ["loss", "block"])
def test_trial_that_runs_out_of_memory_leaves_no_trace_under_zero3(sharded: Path, where: str) -> None:
    assert_same_weights(sharded / "halves", sharded / where, rtol=0, atol=0)


def config(**sections: dict):  # type: ignore[no-untyped-def]
    recipe = {name: PIXELS.RECIPE[name] for name in ("model", "schedule", "optim", "ema")}
    return build_config({**recipe, **sections})


def test_report_counts_all_parameters_and_the_backbone_block_by_block() -> None:
    report = report_on(config(), task_type=PIXELS.PatchPixels)
    model = build_on_meta(lambda: PIXELS.PixelDecoder(create_model("vit_mu", **(BACKBONE | {"in_chans": 3}))))
    params = sum(p.numel() for p in model.parameters())
    assert report.count.params == params
    assert report.count.macs == count_model(model.backbone).macs
    block = max(sum(p.numel() for p in block.parameters()) for block in model.backbone.blocks)
    gathered = report.memory["zero3"]
    assert block < params / 2
    plain = report_on(config(), task_type=OnlyBackbone).memory["zero3"]
    assert plain["weights"] < gathered["weights"] < 1.1 * plain["weights"], "one block is gathered, not the backbone"


class OnlyBackbone(PIXELS.PatchPixels):
    def build(self) -> torch.nn.Module:
        return super().build().backbone


class TwoPasses(PIXELS.PatchPixels):
    """An encoder of a quarter of the patches, a decoder of all of them, and a frozen teacher."""

    def cost_parts(self, model: torch.nn.Module) -> list[CostPart]:
        backbone = model.backbone
        return [
            CostPart("encoder", backbone, tokens=0.25),
            CostPart("decoder", backbone),
            CostPart("teacher", backbone, backward=False),
        ]


def test_activations_are_those_of_all_trained_parts() -> None:
    full = report_on(config(), task_type=PIXELS.PatchPixels).activations
    quarter = report_on(config(model=PIXELS.RECIPE["model"] | {"patch_dropout": 0.75}), task_type=PIXELS.PatchPixels)
    both = report_on(config(), task_type=TwoPasses).activations
    assert both.total == full.total + quarter.activations.total


def test_traced_part_has_measured_activations() -> None:
    class Traced(PIXELS.PatchPixels):
        def cost_parts(self, model: torch.nn.Module) -> list[CostPart]:
            return [CostPart("model", model)]

    report = report_on(config(), task_type=Traced)
    assert report.activations.by_part["saved_tensors"] > 0
    assert report.train_flops > report_on(config(), task_type=PIXELS.PatchPixels).train_flops * 0.9


def test_frozen_backbone_leaves_the_added_layers_to_train(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "model.freeze=all", "schedule.steps=4")
    raw, ema = weights_of(folder, "raw"), weights_of(folder, "ema")
    assert {name.split(".")[0] for name in raw if not torch.equal(raw[name], ema[name])} == {"decoder"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["params_trained"] == sum(t.numel() for name, t in raw.items() if name.startswith("decoder."))
    assert summary["params"] == sum(t.numel() for t in raw.values())
