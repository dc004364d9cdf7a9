"""Attention during training: at its own steps, the same images, and without disturbing a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vit_scale.attention_report import periodic
from vit_scale.attention_report.periodic import AttentionWatch, block_metrics
from vit_scale.config import Config
from vit_scale.data.batch import DataInfo
from vit_scale.data.data import open_data
from vit_scale.errors import UserError
from vit_scale.models import create_model
from vit_scale.page.runs import read_runs
from vit_scale.recipe import build_config, load_recipe
from vit_scale.tasks.classify.classification import Classification
from vit_scale.train.run_recipe import run_recipe

TINY = {"name": "vit_mu", "img_size": 8, "patch_size": 2}


def config(**track: Any) -> Config:
    data = {"source": "embedded:digits"}
    return build_config({"model": TINY, "data": data, "schedule": {"steps": 1}, "track": track})


def watch(options: Config, model: Any = None) -> tuple[AttentionWatch, Any]:
    data = open_data(options.data, Classification.make_target(options), seed=0)
    task = Classification(options, DataInfo(0, data.info.in_chans, data.class_names))
    model = model or task.build()
    return AttentionWatch(options, task, data.val, model, "fp32"), model


class Shown(SimpleNamespace):
    """`tasks.task.Show` that keeps what it is shown."""

    def __init__(self, model: Any) -> None:
        super().__init__(model=model, tables=[], images={}, lines=[])

    def table(self, table: Any) -> None:
        self.tables.append(table)

    def image(self, name: str, draw: Any, *, title: str, caption: str) -> None:
        self.images[name] = draw()

    def info(self, text: str) -> None:
        self.lines.append(text)


def test_table_and_picture_are_those_of_the_same_few_images() -> None:
    seen, model = watch(config())
    other, _ = watch(config(), model)
    assert len(seen.images) == periodic.IMAGES
    assert torch.equal(seen.images, other.images)
    shown = Shown(model)
    found = seen.try_show(shown)
    assert found is not None
    assert [table.name for table in shown.tables] == ["attention_statistics"]
    assert shown.tables[0].rows == found.table().rows
    assert list(shown.images) == ["attention_overview"]
    metrics = block_metrics(found)
    assert list(metrics) == [f"attention_{name}_block{i}" for i in range(2) for name in ("distance", "entropy")]
    assert metrics["attention_distance_block1"] == pytest.approx(found.blocks[1].distance.mean().item())
    assert not shown.lines


def test_large_images_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "MAX_PIXELS", 3 * 64)
    assert len(watch(config())[0].images) == 3


def test_failure_is_reported_and_does_not_stop_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, model = watch(config())
    monkeypatch.setattr(periodic, "AttentionMeter", lambda *_, **__: 1 / 0)
    shown = Shown(model)
    assert seen.try_show(shown) is None
    assert shown.lines == ["No attention statistics: division by zero."]


def test_model_without_attention_is_rejected_only_if_attention_is_requested() -> None:
    model = create_model("timm/test_resnet", num_classes=10, in_chans=1)
    seen, _ = watch(config(), model)
    assert seen.measure(model) is None
    with pytest.raises(UserError, match="track.attention_every = 5: .*no attention to look at"):
        watch(config(attention_every=5), model)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps, evaluated every 6, its attention measured every 5. Not to be changed."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    folder = tmp_path_factory.mktemp("looked") / "run"
    options = ["data.workers=0", "track.wandb=offline", "track.attention_every=5", f"run.dir={folder}"]
    assert run_recipe(load_recipe("recipes/debug.yaml", options), "recipes/debug.yaml") == 0
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return folder


def lines(folder: Path, key: str) -> list[tuple[int, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in found if key in line]


def test_attention_is_logged_at_its_own_steps_and_training_does_not_change(run: Path, trained_run: Path) -> None:
    distance = lines(run, "val_ema/attention_distance_block1")
    assert [step for step, _ in distance] == [5, 10, 12]
    assert all(0 < value < 12 for _, value in distance)
    assert not lines(run, "val/attention_distance_block1"), "of the EMA weights only"
    assert lines(run, "train/loss") == lines(trained_run, "train/loss")
    assert lines(run, "val/loss") == lines(trained_run, "val/loss")
    assert not lines(trained_run, "val_ema/attention_distance_block1"), "off by default"


def test_numbers_of_the_run_are_those_of_its_weights(run: Path) -> None:
    import vit_scale

    loaded = vit_scale.load_run(run)
    options = config()
    seen, _ = watch(options, loaded.backbone)
    found = seen.measure(loaded.backbone, spectrum=True)
    assert found is not None
    key = "attention_entropy_block1"
    assert block_metrics(found)[key] == pytest.approx(lines(run, f"val_ema/{key}")[-1][1], rel=1e-5)
    recorded = json.loads((run / "tables" / "attention_statistics.json").read_text())
    assert (recorded["step"], recorded["weights"]) == (12, "ema")
    for row, expected in zip(recorded["rows"], found.table().rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-3)


def test_page_and_wandb_have_the_attention_of_the_run(run: Path) -> None:
    from vit_scale.page.page import render_page

    page = render_page(read_runs([run]))
    assert page.count("<h2>Where it looks</h2>") == 1
    for title in ("Attention distance", "Effective rank", "Entropy over training", "Attention by block"):
        assert f"<b>{title}</b>" in page
    assert "<h2>More</h2>" not in page
    media = run / "wandb"
    assert list(media.glob("offline-run-*/files/media/table/attention_statistics*"))
    assert list(media.glob("offline-run-*/files/media/images/pictures/attention_overview*"))


def test_resumed_run_measures_what_it_left_to_do(tmp_path: Path, fresh_accelerate: None) -> None:
    """A run that is stopped between a step and its measurement has it after resuming, once."""
    from vit_scale.train import loop

    options = ["data.workers=0", "track.wandb=disabled", "track.attention_every=5", f"run.dir={tmp_path / 'run'}"]
    options += ["run.eval_images=20", "track.images=never"]
    before, loop.evaluate_now = loop.evaluate_now, lambda *_: 1 / 0
    try:
        with pytest.raises(ZeroDivisionError):
            run_recipe(load_recipe("recipes/debug.yaml", options), "recipes/debug.yaml")
    finally:
        loop.evaluate_now = before
    assert not lines(tmp_path / "run", "val_ema/attention_entropy_block0")
    assert run_recipe(load_recipe("recipes/debug.yaml", options), "recipes/debug.yaml") == 0
    assert [step for step, _ in lines(tmp_path / "run", "val_ema/attention_entropy_block0")] == [5, 10, 12]
