"""Any timm model trains through the same recipes: one of each family, a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import run_script

FAMILIES = [
    "timm/swin_tiny_patch4_window7_224",
    "timm/pvt_v2_b1",
    "timm/convnext_tiny",
    "timm/mobilevitv2_100",
    "timm/efficientformer_l1",
    "timm/fastvit_t8",
    "timm/deit_tiny_distilled_patch16_224",
    "timm/resnet50",
]
OPTIONS = [
    "model.img_size=null",
    "model.patch_size=null",
    "model.layer_scale=null",
    "data.source=synthetic",
    "data.synthetic_images=8",
    "data.synthetic_classes=3",
    "data.workers=0",
    "batch.global=4",
    "batch.micro=2",
    "batch.eval=4",
    "schedule.steps=2",
    "schedule.warmup_steps=1",
    "run.log_every=1",
    "track.wandb=disabled",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("families")
    jobs = [
        {"recipe": "recipes/debug.yaml", "options": [*OPTIONS, f"model.name={name}", f"run.dir={top / name}"]}
        for name in FAMILIES
    ]
    done = run_script("tests/workers/train_many.py", json.dumps(jobs), timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return top


@pytest.mark.parametrize("name", FAMILIES)
def test_family_trains_and_evaluates(folder: Path, name: str) -> None:
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)
    summary = json.loads((folder / name / "summary.json").read_text())
    assert summary["finished"]
    assert 0 <= summary["val/top1"] <= 1


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_load_into_timm(folder: Path, name: str) -> None:
    import timm
    from safetensors.torch import load_file

    model = timm.create_model(name.removeprefix("timm/"), num_classes=3)
    loaded = model.load_state_dict(load_file(folder / name / "model_ema.safetensors"))
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
