"""A task other than classification, whose model is a composite: loaded without data, evaluated, not classified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vit_scale
from vit_scale.data.batch import Batch, DataInfo
from vit_scale.errors import UserError
from vit_scale.inference.eval_data import fit_classes, open_eval_data
from vit_scale.inference.eval_report import print_evaluation, to_json, write_files
from vit_scale.inference.evaluate_run import evaluate_run
from vit_scale.inference.prediction import predict
from vit_scale.models import construct_from_config
from vit_scale.recipe import build_config, to_yaml
from vit_scale.strategies.processes import join_processes
from vit_scale.tasks.task import Evaluator, Inputs, Means, Metric, Show, Table, Task

OPTIONS = {
    "model": {"name": "vit_mu", "img_size": 8, "patch_size": 2},
    "data": {"source": "embedded:digits", "workers": 0},
    "schedule": {"steps": 1},
    "batch": {"eval": 32},
}


class Composite(nn.Module):
    """A backbone and a head that predicts the brightness of an image; has no img_size or num_classes."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone, self.brightness = backbone, nn.Linear(2, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.brightness(self.backbone(x_BCHW))[:, 0]


class Brightness(Task):
    name = "brightness"
    metrics = (Metric("error", "error", higher=False, percent=False),)

    def build(self) -> nn.Module:
        return Composite(construct_from_config(self.config.model, num_classes=2, in_chans=self.in_chans))

    def inputs(self, batch: Batch, step: int) -> Inputs:
        return Inputs((self.normalized(batch),), {"brightness": _brightness(batch)})

    def loss(self, outputs: Any, inputs: Inputs) -> dict[str, Tensor]:
        return {"loss": (outputs - inputs.rest["brightness"]).square().mean()}

    def evaluator(self, *, inspect: bool) -> Evaluator:
        return BrightnessEvaluator(
            lambda outputs, batch: {"error": (outputs - _brightness(batch)).square()}, torch.device("cpu")
        )


class BrightnessEvaluator(Means):
    """Means, and a table and an image without any of classification."""

    def show(self, out: Show) -> None:
        rows = [[f"bin {i}", i / 3] for i in range(25)]
        out.table(Table("bins", "Errors per [bin]", ["bin", "error"], rows))
        out.image("histogram", lambda: Image.new("L", (9, 9)), title="Histogram", caption="")


def _brightness(batch: Batch) -> Tensor:
    return batch.images.float().mean((1, 2, 3)) / 255


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of the task."""
    torch.manual_seed(0)
    config = build_config(OPTIONS)
    model = Brightness(config, DataInfo(0, 1, ("a", "b", "c"))).build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    summary = {"finished": True, "in_chans": 1, "class_names": ["a", "b", "c"], "task": {"name": "brightness"}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def test_task_type_replaces_the_task_and_data_is_not_read(run_dir: Path) -> None:
    config = (run_dir / "config.yaml").read_text()
    assert "embedded:digits" in config
    (run_dir / "config.yaml").write_text(config.replace("embedded:digits", "no/such/directory"))
    loaded = vit_scale.load_run(run_dir, task_type=Brightness)
    assert isinstance(loaded.task, Brightness)
    assert loaded.task.info == DataInfo(0, 1, ("a", "b", "c"))
    assert loaded.backbone is loaded.model.backbone
    assert loaded.transform(Image.new("L", (8, 8))).shape == (1, 8, 8)
    saved = load_file(run_dir / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.model.state_dict().items())


def test_run_of_another_task_is_not_loaded_as_classifier(run_dir: Path) -> None:
    with pytest.raises(UserError, match="model.safetensors"):
        vit_scale.load_run(run_dir)


def test_evaluation_of_another_task_equals_its_definition(
    run_dir: Path, fresh_accelerate: None, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = vit_scale.load_run(run_dir, task_type=Brightness)
    data = open_eval_data(loaded.config, None, None)
    fitted, relabel = fit_classes(loaded, data)
    assert fitted is loaded
    assert relabel is None, "labels are not matched to classes"
    evaluation = evaluate_run(loaded, data, None, join_processes())
    images = [data.source.read(i).image for i in range(len(data.source))]
    inputs = torch.stack([loaded.transform(image) for image in images])
    pixels = torch.stack([torch.from_numpy(loaded.transform.pixels(image)) for image in images])
    expected = (loaded.model(inputs) - pixels.float().mean((1, 2, 3)) / 255).square().mean()
    assert evaluation.images == len(images)
    assert evaluation.metrics == pytest.approx({"error": expected.item()}, rel=1e-5)

    print_evaluation(evaluation, {"model": "m"})
    out = capsys.readouterr().out
    assert f"error  {expected.item():.4f}" in out
    assert "Errors per [bin]: the first 20 of 25" in out
    assert "bin 19" in out
    assert "bin 20" not in out
    assert "%" not in out
    assert json.loads(to_json(evaluation, {}))["bins"][3] == {"bin": "bin 3", "error": 1.0}
    names = write_files(evaluation, {}, run_dir / "eval")
    assert names == ["metrics.json", "bins.csv", "histogram.png"]
    assert {path.name for path in (run_dir / "eval").iterdir()} == set(names)


def test_classes_of_another_task_are_not_predicted(run_dir: Path, tmp_path: Path) -> None:
    loaded = vit_scale.load_run(run_dir, task_type=Brightness)
    with pytest.raises(UserError, match="task brightness does not predict classes"):
        next(predict(loaded, [tmp_path / "image.png"]))
