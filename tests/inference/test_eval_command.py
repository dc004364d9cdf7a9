"""`launch/eval.py`: same metrics as training, as timm, and with any number of processes; invalid input is reported."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.processes import run_script
from vit_scale.commands.eval import main
from vit_scale.errors import UserError
from vit_scale.inference.eval_data import match_classes
from vit_scale.inference.eval_report import Evaluation, ReportShow, print_evaluation, to_json
from vit_scale.models import create_model
from vit_scale.models.variants import pixel_statistics
from vit_scale.tasks.results import Metric

CLASSES = ("n01440764", "n01443537", "n01484850")
PIXELS = 36
"""Evaluation at 32 pixels with a crop of 0.875 center-crops such images without resizing."""


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A directory with three classes of ten images each."""
    rng = np.random.default_rng(0)
    for i, name in enumerate(CLASSES):
        (tmp_path / "images" / name).mkdir(parents=True)
        for j in range(10):
            pixels = rng.integers(0, 200, (PIXELS, PIXELS, 3)) + 25 * i
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "images" / name / f"{j}.png")
    return tmp_path / "images"


@pytest.fixture
def resnet(tmp_path: Path) -> Path:
    """Weights of a tiny timm model for three classes, none of which is predicted for all images."""
    torch.manual_seed(0)
    model = create_model("timm/test_resnet", num_classes=3).eval()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in pixel_statistics("timm/test_resnet"))
    noise = ((25 + 200 * torch.rand(64, 3, 32, 32)) / 255 - mean) / std  # like the images of the second class
    with torch.no_grad():
        head = model.get_classifier()
        head.weight.normal_(std=0.5)
        logits = model(noise)
        head.weight /= logits.std(0, keepdim=True).T
        head.bias -= model(noise).mean(0)
    save_file(model.state_dict(), tmp_path / "resnet.safetensors")
    return tmp_path / "resnet.safetensors"


OF_RESNET = ["--model", "timm/test_resnet", "model.img_size=32", "augment.eval_crop=0.875", "data.workers=0"]


def evaluate(*arguments: object, out: Path) -> dict:
    assert main([*map(str, arguments), "--json", str(out)]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize(("weights", "key"), [("ema", "val_ema"), ("raw", "val")])
def test_metrics_equal_those_of_training(run: Path, tmp_path: Path, weights: str, key: str) -> None:
    metrics = evaluate(run, "--weights", weights, out=tmp_path / "e.json")
    summary = json.loads((run / "summary.json").read_text())
    for name in ("top1", "top5", "loss"):
        assert metrics[name] == pytest.approx(summary[f"{key}/{name}"], abs=1e-6)
    assert sum(row["images"] for row in metrics["classes"]) == metrics["images"] == 180


def test_cap_of_the_run_does_not_limit_its_evaluation(run: Path, tmp_path: Path) -> None:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("eval_images: null", "eval_images: 20"))
    assert "eval_images: null" in config
    assert evaluate(run, out=tmp_path / "e.json")["images"] == 180
    metrics = evaluate(run, "run.eval_images=20", out=tmp_path / "e.json")
    assert [row["images"] for row in metrics["classes"]] == [2] * 10


def test_tables_and_figures_are_written_to_the_run_directory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    folder = run / "eval-val"
    written = {"metrics.json", "classes.csv", "confusion.csv", "confusion.png", "reliability.png"}
    written |= {"mistakes.png", "attention.png"}
    assert {path.name for path in folder.iterdir()} == written
    with (folder / "confusion.csv").open() as file:
        rows = list(csv.reader(file))
    assert sum(int(cell) for row in rows[1:] for cell in row[1:]) == 180
    assert Image.open(folder / "confusion.png").size[0] > 500
    out = capsys.readouterr().out
    for text in ("top-1", "top-5", "loss", "calibration", "images/s", "recall", "mistaken for"):
        assert text in out


def test_unavailable_precision_and_kernel_fall_back(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp16 and a kernel that a CPU does not have."""
    if torch.cuda.is_available():
        pytest.skip("requires a CPU-only system")
    changed = re.sub("(attention|kernel): auto", r"\1: cudnn", (run / "config.yaml").read_text())
    (run / "config.yaml").write_text(changed.replace("precision: auto", "precision: fp16"))
    assert "cudnn" in changed
    assert evaluate(run, out=tmp_path / "e.json")["images"] == 180
    assert "evaluating in fp32" in capsys.readouterr().err


def test_other_splits_and_data_have_separate_directories(run: Path, images: Path) -> None:
    assert main([str(run), "--split", "train"]) == 0
    assert json.loads((run / "eval-train/metrics.json").read_text())["images"] == 1617
    assert main([str(run), "--data", str(images), "--match-by-index"]) == 0
    folders = {path.name for path in run.glob("eval-*")}
    assert len(folders) == 2
    assert any("images" in name for name in folders)


def test_two_processes_count_each_image_once(run: Path, tmp_path: Path, images: Path) -> None:
    (images / CLASSES[0] / "9.png").unlink()  # 29 images: an unequal number per process
    arguments = [str(run), "--data", str(images), "--match-by-index", "batch.eval=4", "data.workers=0"]
    done = run_script("launch/eval.py", *arguments, "--json", tmp_path / "two.json", processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("top-1") == 1
    alone = evaluate(*arguments, out=tmp_path / "one.json")
    two = json.loads((tmp_path / "two.json").read_text())
    assert two["images"] == alone["images"] == 29
    assert two["classes"] == alone["classes"]
    for name in ("top1", "top5", "loss", "calibration_error"):
        assert two[name] == pytest.approx(alone[name], abs=1e-6)


def test_metrics_equal_those_of_timms_evaluation(images: Path, resnet: Path, tmp_path: Path) -> None:
    """timm's validate.py is not in its package; this does the same with its dataset, loader and configuration."""
    import timm
    from timm.data import create_dataset, create_loader, resolve_data_config

    ours = evaluate(resnet, *OF_RESNET, "--data", images, "--out", tmp_path / "out", out=tmp_path / "e.json")
    theirs = timm.create_model("test_resnet", num_classes=3, checkpoint_path=str(resnet)).eval()
    seen = resolve_data_config({"img_size": 32, "crop_pct": 0.875}, model=theirs, use_test_size=True)
    loader = create_loader(
        create_dataset("", str(images)),
        input_size=seen["input_size"],
        batch_size=8,
        use_prefetcher=False,
        interpolation=seen["interpolation"],
        mean=seen["mean"],
        std=seen["std"],
        num_workers=0,
        crop_pct=seen["crop_pct"],
        crop_mode=seen["crop_mode"],
    )
    with torch.inference_mode():
        logits, labels = map(torch.cat, zip(*((theirs(x), y) for x, y in loader), strict=True))
    assert ours["images"] == len(labels) == 30
    assert ours["top1"] == (logits.argmax(1) == labels).sum().item() / 30
    assert ours["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), abs=1e-4)
    pairs = torch.stack((labels, logits.argmax(1)))
    confusion = [[(pairs == torch.tensor([[i], [j]])).all(0).sum().item() for j in range(3)] for i in range(3)]
    with (tmp_path / "out/confusion.csv").open() as file:
        assert [list(map(int, row[1:])) for row in list(csv.reader(file))[1:]] == confusion
    assert logits.argmax(1).unique().numel() > 1, "predictions differ between images"


def test_published_weights_are_evaluated_by_name(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm is patched to need no network; a subset of ImageNet is matched by its synsets."""
    import timm

    real = timm.create_model

    def create(name: str, pretrained: bool = False, **options: object) -> torch.nn.Module:
        torch.manual_seed(7)
        return real(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", create)
    metrics = evaluate("timm/test_resnet", "--data", images, "data.workers=0", out=tmp_path / "e.json")
    counted = {row["name"]: row["images"] for row in metrics["classes"] if row["images"]}
    assert counted == dict.fromkeys(CLASSES, 10)
    assert len(metrics["classes"]) == 1000
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("e.json", "images")] == []


def test_classes_are_matched_by_name() -> None:
    assert match_classes(("a", "b"), ("a", "b"), 2) is None
    assert match_classes(("b", "a"), ("a", "b", "c"), 3).tolist() == [1, 0]
    assert match_classes(("0", "1"), ("cat", "dog"), 2) is None, "datasets without names have numbers"
    assert match_classes(("x", "y"), ("cat", "dog"), 2, match_by_index=True) is None
    with pytest.raises(UserError, match="does not have: x, y; classes of the model: cat, dog.\nIf .* --match-by-index"):
        match_classes(("x", "y"), ("cat", "dog"), 2)
    with pytest.raises(UserError, match="the data has 3 classes, the model only 2"):
        match_classes(("x", "y", "z"), (), 2)


def test_corrupt_image_is_reported_or_skipped(images: Path, resnet: Path, tmp_path: Path) -> None:
    (images / CLASSES[1] / "3.png").write_bytes(b"corrupt")
    with pytest.raises(UserError, match=r"3\.png.*data\.on_error=skip"):
        main([str(resnet), *OF_RESNET, "--data", str(images)])
    metrics = evaluate(resnet, *OF_RESNET, "--data", images, "data.on_error=skip", out=tmp_path / "e.json")
    assert metrics["images"] == 29


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/run"], "run not found"),
        (["recipes"], "neither a run directory"),
        (["timm/test_resnt"], "test_resnet"),
        (["{resnet}"], "add --model NAME"),
        (["{resnet}", "--model", "timm/test_resnet"], "Add --data SOURCE"),
        (["{resnet}", "--model", "timm/test_vit", "--data", "{images}"], "not the weights of timm/test_vit"),
        (["{run}", "--model", "timm/resnet18"], "the run .* defines its model"),
        (["{run}", "--data", "{images}"], "classes that the model does not have"),
        (["{run}", "--split", "tset"], "split not found"),
        (["{run}", "--weights", "best"], "invalid choice"),
        (["{run}", "--data", "{empty}"], "no images"),
        (["{run}", "--json", "no/such/folder/e.json"], "does not exist"),
        (["{run}", "augment.eval_crp=1"], "augment.eval_crop"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_input_is_reported_and_nothing_is_written(
    arguments: list[str], message: str, run: Path, images: Path, resnet: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"run": run, "images": images, "resnet": resnet, "empty": tmp_path / "empty"}
    with pytest.raises(UserError, match=message):
        main([argument.format(**places) for argument in arguments])
    assert not list(run.glob("eval-*"))


def test_metrics_that_are_not_shown_are_in_the_json_only(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = (Metric("top1", "top-1"), Metric("top5", "top-5", shown=False))
    show = ReportShow(torch.nn.Identity(), enabled=True)
    evaluation = Evaluation(metrics, {"top1": 0.5, "top5": 1.0}, {}, {}, 10, 1.0, show)
    print_evaluation(evaluation, {})
    printed = capsys.readouterr().out
    assert "top-1" in printed
    assert "top-5" not in printed
    assert json.loads(to_json(evaluation, {}))["top5"] == 1.0
