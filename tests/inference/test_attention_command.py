"""`launch/attention.py`: images and datasets, one run or two, any number of processes; invalid input is reported."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vit_scale
from vit_scale.attention_report.maps import image_maps
from vit_scale.commands.attention import main, parse
from vit_scale.errors import UserError
from vit_scale.models import create_model

QUICK = ["--images", "20", "data.workers=0"]


@pytest.fixture(scope="module")
def run(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: two blocks of two heads, no labels needed."""
    return Path(shutil.copytree(trained_run, tmp_path_factory.mktemp("attention") / "run"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images without labels in two directories, two of the same name, and a file that is none."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (12, 20), dtype=np.uint8)
    for name in ("a.png", "b.png", "more/a.png"):
        Image.fromarray(pixels).save(folder / name)
    (folder / "broken.png").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def convolutional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "resnet.safetensors"
    save_file(create_model("timm/test_resnet", num_classes=10).state_dict(), path)
    return path


def numbers(*arguments: object, out: Path) -> dict:
    assert main([*map(str, arguments), "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_dataset_of_a_run_has_numbers_plots_and_pictures(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path(shutil.copytree(run, tmp_path / "run"))
    found = numbers(own, *QUICK, out=tmp_path / "a.json")
    printed = capsys.readouterr().out
    for text in ("distance", "entropy", "effective rank", "20 images, 4 x 4 patches of 2 x 2 pixels", "Wrote"):
        assert text in printed
    folder = own / "attention-val"
    files = {"statistics.json", "statistics.csv", "spectra.npz"}
    files |= {f"{name}.png" for name in ("statistics", "spectrum", "similarity", "examples")}
    assert {path.name for path in folder.iterdir()} == files
    rows = list(csv.DictReader((folder / "statistics.csv").open()))
    heads = found["runs"][0]["heads"]
    assert [(row["block"], row["head"]) for row in rows] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    for row, head in zip(rows, heads, strict=True):
        assert float(row["distance"]) == head["distance"] > 0
        assert 0 < head["entropy"] <= 1
    spectra = np.load(folder / "spectra.npz")
    tokens = found["runs"][0]["prefix_tokens"] + 16
    assert spectra["run0_block1_singular_values"].shape == (2, tokens)
    assert (np.diff(spectra["run0_block1_singular_values"]) <= 0).all()


def test_two_runs_are_side_by_side_on_the_same_images(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    found = numbers(run, other, *QUICK, "--out", tmp_path / "both", out=tmp_path / "a.json")
    first, second = found["runs"]
    assert (first["name"], second["name"]) == ("run", "other")
    assert first["heads"] == second["heads"]
    lines = (tmp_path / "both" / "statistics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["run"] + ["run"] * 4 + ["other"] * 4


def test_images_have_a_picture_and_arrays_each(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(run), str(photos), "--blocks", "-1", "--heads", "1", "--out", str(out)]) == 0
    assert "broken.png: " in capsys.readouterr().err
    assert {path.name for path in out.iterdir()} == {
        f"{stem}-heads.{kind}" for stem in ("a", "b", "a-2") for kind in ("png", "npz")
    }
    arrays = np.load(out / "b-heads.npz")
    assert arrays["blocks"].tolist() == [1]
    assert arrays["heads"].tolist() == [1]
    loaded = vit_scale.load_run(run)
    expected = image_maps(loaded.backbone, loaded.transform(photos / "b.png")[None])
    np.testing.assert_allclose(arrays["patches"], expected.patches[1][:, 1:], atol=1e-6)
    np.testing.assert_allclose(arrays["patches_mean"][0], expected.patches[1][0].mean(0), atol=1e-6)
    np.testing.assert_allclose(arrays["rollout"], expected.rollout[0], atol=1e-6)
    assert arrays["pixels"].dtype == np.uint8


def test_two_runs_share_a_picture(run: Path, photos: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    for name, runs in (("one", [run]), ("two", [run, other])):
        assert main([*map(str, runs), str(photos / "a.png"), "--out", str(tmp_path / name)]) == 0
    one, two = (Image.open(tmp_path / name / "a-heads.png") for name in ("one", "two"))
    assert two.width == 2 * one.width
    assert "run1_rollout" in np.load(tmp_path / "two" / "a-heads.npz")


def test_weights_file_on_images_without_labels(run: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes((run / "model_ema.safetensors").read_bytes())
    options = ["--model", "vit_mu", "model.img_size=8", "model.patch_size=2", "model.layer_scale=1e-4"]
    options += ["model.in_chans=1", "--data", str(photos), "data.on_error=skip", "data.workers=0"]
    found = numbers(tmp_path / "w.safetensors", *options, out=tmp_path / "a.json")
    assert found["runs"][0]["grid"] == [4, 4]
    assert found["runs"][0]["images"] == 3
    assert not list(tmp_path.glob("attention*")), "without a run nothing is written unless --out is set"


def test_run_at_another_image_size_has_more_patches(run: Path, tmp_path: Path) -> None:
    options = ["model.img_size=[8,12]", "--images", "4", "data.workers=0", "--out", tmp_path / "out"]
    assert numbers(run, *options, out=tmp_path / "a.json")["runs"][0]["grid"] == [4, 6]


def test_two_processes_give_the_same_numbers(run: Path, tmp_path: Path, launch_processes: Callable) -> None:
    script = ["launch/attention.py", str(run), "--images", "13", "batch.eval=4", "data.workers=0", "--spectra", "5"]
    together = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *script]
    (done,) = launch_processes([*together, "--json", str(tmp_path / "2.json"), "--out", str(tmp_path / "2")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("per block") == 1
    alone = numbers(*script[1:], "--out", tmp_path / "1", out=tmp_path / "1.json")["runs"][0]
    both = json.loads((tmp_path / "2.json").read_text())["runs"][0]
    assert (both["images"], both["spectrum_images"]) == (alone["images"], alone["spectrum_images"]) == (13, 5)
    for mine, other in zip(both["heads"], alone["heads"], strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/run"], "run not found"),
        (["{run}", "no/such/image.png"], "no/such/image.png: file not found"),
        (["{run}", "{empty}"], "no images in this directory"),
        (["{run}", "--data", "{empty}"], "no images|not found"),
        (["{run}", "{broken}"], "none of 1 files could be read"),
        (["{run}", "--blocks", "4"], "--blocks 4: vit_mu has blocks 0 to 1"),
        (["{run}", "--heads", "-3"], "--heads -3: vit_mu has heads 0 to 1"),
        (["{run}", "--heads", "first"], "'first': expected numbers with commas"),
        (["{run}", "--images", "0"], "'0': expected a number of at least 1"),
        (["{run}", "{broken}", "--images", "5"], "--images: only for a dataset"),
        (["{resnet}", "--model", "timm/test_resnet", "--data", "embedded:digits"], "no attention to look at"),
        (["{weights}", "--model", "vit_mu", "model.layer_scale=1e-4"], "no images to look at"),
        (["{run}", "--json", "no/such/folder/a.json"], "does not exist"),
        (["{run}", "model.imgsize=8"], "imgsize"),
        (["{run}", "--block", "1,2", "--unknown"], "unrecognized arguments: --unknown"),
        (["model.img_size=8"], "required: RUN"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_input_is_reported_and_nothing_is_written(
    arguments: list[str], message: str, run: Path, convolutional: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    weights = tmp_path / "weights.safetensors"
    config = ["model.img_size=8", "model.patch_size=2", "model.in_chans=1"] if "{weights}" in arguments else []
    weights.write_bytes((run / "model_ema.safetensors").read_bytes())
    places = {"run": run, "resnet": convolutional, "empty": tmp_path / "empty", "broken": photos / "broken.png"}
    with pytest.raises(UserError, match=message) as raised:
        main([argument.format(**places, weights=weights) for argument in arguments] + config)
    assert len(str(raised.value).splitlines()) <= 3
    assert not list(run.glob("attention*"))


def test_words_are_runs_images_and_options(run: Path) -> None:
    words = [str(run), "timm/vit_tiny_patch16_224", "cat.jpg", "--blocks", "-4,-1", "model.img_size=32", "dog.jpg"]
    args, overrides = parse(words)
    assert args.targets == [str(run), "timm/vit_tiny_patch16_224"]
    assert args.files == ["cat.jpg", "dog.jpg"]
    assert (args.blocks, overrides) == ([-4, -1], ["model.img_size=32"])


def test_weights_of_a_timm_model_have_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    name = "timm/vit_tiny_patch16_224"
    save_file(create_model(name, img_size=32, num_classes=3).state_dict(), tmp_path / "w.safetensors")
    options = ["--model", name, "model.img_size=32", "--data", "embedded:digits", "data.workers=0", "--images", "4"]
    found = numbers(tmp_path / "w.safetensors", *options, out=tmp_path / "a.json")
    assert (found["runs"][0]["prefix_tokens"], len(found["runs"][0]["heads"])) == (1, 36)
