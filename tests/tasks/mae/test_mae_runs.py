"""Runs of a masked autoencoder: evaluated, probed, fine-tuned and exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import vit_scale
from vit_scale.commands.eval import main as evaluate
from vit_scale.commands.export import main as export
from vit_scale.commands.predict import main as predict
from vit_scale.commands.probe import main as probe
from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import load_encoder
from vit_scale.inference.pretrained import load_target
from vit_scale.models import create_model
from vit_scale.models.weights.load import load_weights
from vit_scale.probe import linear, projection
from vit_scale.probe.features import FeatureModel
from vit_scale.recipe import load_recipe
from vit_scale.train.run_recipe import run_recipe

RECIPE = {
    "task": {"name": "mae"},
    "model": {"name": "vit_mu", "img_size": 8, "patch_size": 2, "registers": 1},
    "mae": {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
    "data": {"source": "embedded:digits", "workers": 0},
    "schedule": {"steps": 8},
    "optim": {"lr": 3e-3},
    "batch": {"global": 32, "micro": 8},
    "ema": {"decay": 0.9},
    "run": {"log_every": 1, "eval_every": 4, "save_every": 100, "probe_every": 3},
    "track": {"wandb": "disabled"},
}
ENCODER = {"img_size": 8, "patch_size": 2, "registers": 1, "in_chans": 1}
FILES = {f"{name}.safetensors" for name in ("model", "model_ema", "rest", "rest_ema")}


def train(recipe: Path, folder: Path, *options: str) -> Path:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        assert run_recipe(load_recipe(recipe, [f"run.dir={folder}", *options]), str(recipe)) == 0
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mae") / "mae.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    """A finished run of one process. Not to be changed."""
    return train(recipe, recipe.parent / "one")


def metrics(folder: Path) -> list[tuple[int, str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("train/loss", *(f"{kind}/{name}" for kind in ("val", "val_ema") for name in ("loss", "knn_top1")))
    return [(line["step"], key, line[key]) for line in lines for key in keys if key in line]


def test_final_weights_are_the_encoder_under_timms_names(run: Path) -> None:
    encoder = create_model("vit_mu", num_classes=0, **ENCODER)
    weights, rest = load_file(run / "model.safetensors"), load_file(run / "rest.safetensors")
    encoder.load_state_dict(weights)  # all of them, and no others
    assert {name.split(".")[0] for name in rest} == {"decoder"}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["params"] == sum(t.numel() for t in (*weights.values(), *rest.values()))
    assert summary["best/val/loss"] == min(
        value for _, key, value in metrics(run) if key.startswith("val") and "loss" in key
    )
    assert summary["best/val/loss"] < 1.1


def test_images_say_whose_statistics_were_used(run: Path) -> None:
    shown = json.loads((run / "summary.json").read_text())["pictures"]
    assert list(shown) == ["batch", "reconstructions", "attention_overview"]
    assert "true mean and variance of each patch of the original image" in shown["reconstructions"]["caption"]
    with Image.open(run / "pictures/reconstructions.png") as image:
        assert image.width > 6 * 168, "six tiles in a row"


@pytest.mark.parametrize("kind", ["ema", "raw"])
def test_eval_computes_the_loss_of_the_last_evaluation(run: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "results.json"
    arguments = [str(run), "--weights", kind, "--json", str(out), "--out", str(tmp_path), "data.workers=0"]
    assert evaluate(arguments) == 0
    key = "val_ema/loss" if kind == "ema" else "val/loss"
    last = [value for _, name, value in metrics(run) if name == key][-1]
    assert json.loads(out.read_text())["loss"] == pytest.approx(last, abs=1e-6)
    assert (tmp_path / "reconstructions.png").is_file()


@pytest.mark.parametrize("kind", ["ema", "raw"])
def test_knn_during_training_is_that_of_the_probe_command(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(linear, "STEPS", 1)
    monkeypatch.setattr(projection, "_MIN_FOR_TSNE", 10**6)
    out = tmp_path / "probe.json"
    arguments = [str(run), "--weights", kind, "--k", "20", "--json", str(out), "--out", str(tmp_path)]
    assert probe([*arguments, "data.workers=0"]) == 0
    key = "val_ema/knn_top1" if kind == "ema" else "val/knn_top1"
    found = {step: value for step, name, value in metrics(run) if name == key}
    assert list(found) == [3, 6, 8], "every third step, and the last one"
    assert json.loads(out.read_text())["blocks"][0]["knn20_top1"] == pytest.approx(found[8], abs=1e-9)
    assert found[8] > 0.3, "digits differ without training"


def test_fine_tuning_starts_from_the_encoder(
    run: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = [f"model.weights={run}", "task.name=classify", "model.pool=mean", "schedule.steps=1", "optim.lr=1e-9"]
    plain = tmp_path / "classify.yaml"
    plain.write_text(
        yaml.safe_dump({section: each for section, each in RECIPE.items() if section not in ("task", "mae")})
    )
    tuned = load_file(train(plain, tmp_path / "tuned", *options) / "model.safetensors")
    printed = capsys.readouterr().out
    assert "left as initialized: fc_norm.weight (not among the weights)" in printed
    assert "left as initialized: head.weight (not among the weights)" in printed
    assert "skipped: norm.weight (the model has no such tensor)" in printed
    assert "skipped: decoder.* (19 tensors, not part of the backbone)" in printed
    encoder = load_file(run / "model_ema.safetensors")
    same = {name for name in tuned if name in encoder and torch.allclose(tuned[name], encoder[name], rtol=0, atol=1e-6)}
    assert same == encoder.keys() - {"norm.weight", "norm.bias"}
    assert tuned["head.weight"].shape == (10, 32)


def test_checkpoint_of_an_unfinished_run_fine_tunes_too(run: Path) -> None:
    checkpoint = max((run / "checkpoints").iterdir())
    one, other = (create_model("vit_mu", num_classes=0, **ENCODER) for _ in range(2))
    report = load_weights(one, checkpoint)
    load_weights(other, run)
    assert not report.initialized
    torch.testing.assert_close(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_export_is_the_encoder_with_pooled_features(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, pool: str
) -> None:
    import timm

    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.yaml", "summary.json", *FILES):
        (folder / name).write_bytes((run / name).read_bytes())
    options = yaml.safe_load((folder / "config.yaml").read_text())
    options["model"]["pool"] = pool
    (folder / "config.yaml").write_text(yaml.safe_dump(options))
    assert export([str(folder), "--to", "timm"]) == 0
    assert export([str(folder), "--to", "hub-folder"]) == 0
    printed = capsys.readouterr().out
    assert "maximum feature difference" in printed
    model = timm.create_model(f"local-dir:{folder / 'export/hub'}", pretrained=True).eval()
    images = torch.rand(2, 1, 8, 8)
    features = model(images)
    assert features.shape == (2, 32)
    options = [f"model.{name}={value}" for name, value in (ENCODER | {"pool": pool}).items()]
    probed = (
        load_encoder(folder),
        load_target(str(folder / "export/timm.safetensors"), model="vit_mu", overrides=options, encoder=True),
    )
    for each in probed:
        torch.testing.assert_close(each.model(images), features, rtol=0, atol=1e-5, msg="launch/probe.py judges others")
        torch.testing.assert_close(FeatureModel(each.model)(images)[0], features, rtol=0, atol=1e-5)
    weights = load_file(folder / "export/timm.safetensors")
    assert weights["norm.weight"].equal(load_file(run / "model_ema.safetensors")["norm.weight"])


def test_a_masked_autoencoder_does_not_predict_classes(run: Path, tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "seven.png")
    with pytest.raises(UserError, match=f"task mae does not predict classes; fine-tune it with model.weights={run}"):
        predict([str(run), str(tmp_path / "seven.png")])


def test_loaded_run_reconstructs(run: Path) -> None:
    loaded = vit_scale.load_run(run)
    rest = load_file(run / "rest_ema.safetensors")
    assert torch.equal(loaded.model.decoder.mask_token, rest["decoder.mask_token"])
    predicted = loaded.model(torch.zeros(1, 1, 8, 8), torch.tensor([[0, 5, 10, 15]]))
    assert predicted.shape == (1, 16, 4)
    assert loaded.backbone.forward_features(torch.zeros(1, 1, 8, 8)).shape == (1, 18, 32)


def test_images_need_no_labels(recipe: Path, tmp_path: Path) -> None:
    """A directory of images without classes; one in ten is held out."""
    photos = tmp_path / "photos"
    photos.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(photos / f"{number}.png")
    options = [f"data.source={photos}", "schedule.steps=2"]
    with pytest.raises(UserError, match="run.probe_every = 3: k-NN needs labels") as caught:
        train(recipe, tmp_path / "run", *options)
    assert len(str(caught.value).splitlines()) <= 3
    folder = train(recipe, tmp_path / "run", *options, "run.probe_every=null")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["train_images"] == 36
    assert summary["val_images"] == 4
    assert summary["class_names"] == []
