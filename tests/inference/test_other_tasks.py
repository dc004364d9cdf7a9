"""A task other than classification, whose model is a composite: loaded without data, evaluated, not classified."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mean_color import RECIPE, MeanColor
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vit_scale
from vit_scale.data.batch import Batch, DataInfo
from vit_scale.errors import UserError
from vit_scale.inference.eval_data import fit_classes, open_eval_data
from vit_scale.inference.eval_report import print_evaluation, to_json, write_files
from vit_scale.inference.evaluate_run import evaluate_run
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.inference.prediction import predict
from vit_scale.models import construct_from_config
from vit_scale.recipe import build_config, to_yaml
from vit_scale.record.terminal import Terminal
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
    with pytest.raises(UserError, match="was trained with task 'brightness'; pass task_type= to load_run"):
        vit_scale.load_run(run_dir)


def test_run_is_not_loaded_as_another_custom_task(run_dir: Path) -> None:
    with pytest.raises(UserError, match="was trained with task 'brightness'"):
        vit_scale.load_run(run_dir, task_type=MeanColor)


def test_run_of_an_earlier_version_has_no_recorded_task(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"in_chans": 1, "class_names": ["a", "b", "c"]}))
    assert isinstance(vit_scale.load_run(run_dir, task_type=Brightness).task, Brightness)


@pytest.mark.parametrize(
    "arguments", [["eval.py", "{run}"], ["predict.py", "{run}", "{run}"], ["export.py", "{run}", "--to", "timm"]]
)
def test_commands_reject_a_run_of_a_custom_task(run_dir: Path, launch: Callable, arguments: list[str]) -> None:
    Image.new("L", (8, 8)).save(run_dir / "image.png")
    script, *rest = (argument.format(run=run_dir) for argument in arguments)
    done = launch(f"launch/{script}", *rest)
    assert done.returncode == 2
    assert done.stderr == f"error: {run_dir} was trained with task 'brightness'; pass task_type= to load_run\n"


def test_evaluation_of_another_task_equals_its_definition(
    run_dir: Path, fresh_accelerate: None, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = vit_scale.load_run(run_dir, task_type=Brightness)
    data = open_eval_data(loaded, None, None)
    fitted, relabel = fit_classes(loaded, data)
    assert fitted is loaded
    assert relabel is None, "labels are not matched to classes"
    evaluation = evaluate_run(loaded, data, None, join_processes(), Terminal(enabled=False))
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


@pytest.fixture(scope="module")
def mean_color(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    """A finished run of a task whose data has no targets."""
    folder = tmp_path_factory.mktemp("mean_color") / "run"
    return vit_scale.train(RECIPE, {"run.dir": str(folder), "schedule.steps": 4}, task=MeanColor)


def test_evaluation_of_a_custom_task_equals_that_of_training(mean_color: LoadedRun, fresh_accelerate: None) -> None:
    data = open_eval_data(mean_color, None, None)
    assert data.class_names == ()
    assert data.description == "embedded:digits, val"
    fitted, relabel = fit_classes(mean_color, data)
    evaluation = evaluate_run(fitted, data, relabel, join_processes(), Terminal(enabled=False))
    assert evaluation.images == 180
    assert evaluation.metrics == pytest.approx({"error": mean_color.record["val_ema/error"]}, rel=1e-5)


def test_custom_task_is_evaluated_on_images_without_labels(
    mean_color: LoadedRun, tmp_path: Path, fresh_accelerate: None
) -> None:
    for value in (0, 100, 200):
        Image.new("L", (8, 8), value).save(tmp_path / f"{value}.png")
    data = open_eval_data(mean_color, str(tmp_path), None)
    assert data.description == f"{tmp_path}, train"
    assert evaluate_run(mean_color, data, None, join_processes(), Terminal(enabled=False)).images == 3


def test_columns_of_the_run_are_kept_for_other_data_that_has_them(mean_color: LoadedRun, tmp_path: Path) -> None:
    """The data of the run has two image columns, so they must be named; a directory has only one."""
    import datasets

    images = [Image.new("L", (8, 8), value) for value in (0, 100)]
    table = datasets.Dataset.from_dict(
        {"left": images, "right": images[::-1]},
        features=datasets.Features(left=datasets.Image(), right=datasets.Image()),
    )
    table.save_to_disk(tmp_path / "pairs")
    (tmp_path / "images").mkdir()
    images[1].save(tmp_path / "images/one.png")
    run = replace(mean_color, config=build_config(OPTIONS, ["data.image_column=right"]))
    pairs = open_eval_data(run, str(tmp_path / "pairs"), None)
    assert run.transform.pixels(pairs.source.read(0).image).max() == 100
    assert len(open_eval_data(run, str(tmp_path / "images"), None).source) == 1


def test_classes_of_another_task_are_not_predicted(run_dir: Path, tmp_path: Path) -> None:
    loaded = vit_scale.load_run(run_dir, task_type=Brightness)
    with pytest.raises(UserError, match="task brightness does not predict classes"):
        next(predict(loaded, [tmp_path / "image.png"]))
