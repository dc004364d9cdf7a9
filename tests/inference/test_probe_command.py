"""`launch/probe.py`: features of any run or file, the same with any number of processes; invalid input is reported."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.neighbors import KNeighborsClassifier

import vit_scale
from vit_scale.commands.probe import main, parse
from vit_scale.errors import UserError
from vit_scale.models import create_model
from vit_scale.probe import linear
from vit_scale.probe.projection import principal_components, projection_figure

PATCHES = ["model.img_size=8", "model.patch_size=2"]
QUICK = ["--images", "300", "data.workers=0"]


@pytest.fixture(autouse=True)
def _short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "STEPS", 30)


@pytest.fixture(scope="module")
def run(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: two blocks, LayerScale, no class token."""
    return Path(shutil.copytree(trained_run, tmp_path_factory.mktemp("probe") / "run"))


@pytest.fixture(scope="module")
def headless(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the encoder of the run alone."""
    weights = {name: t for name, t in load_file(run / "model_ema.safetensors").items() if not name.startswith("head")}
    path = tmp_path_factory.mktemp("headless") / "encoder.safetensors"
    save_file(weights, path)
    return path


@pytest.fixture(scope="module")
def unlabeled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unlabeled")
    for value in range(4):
        Image.new("L", (8, 8), 60 * value).save(folder / f"{value}.png")
    return folder


def probe(*arguments: object, out: Path) -> dict:
    assert main([*map(str, arguments), "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_run_is_judged_on_its_own_data(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """k-NN equals scikit-learn on features of `load_run`; two blocks are judged; a picture of each is written."""
    run = Path(shutil.copytree(run, tmp_path / "run"))
    numbers = probe(run, "--images", "400", "--blocks", "-2,-1", "data.workers=0", out=tmp_path / "p.json")
    printed = capsys.readouterr().out
    assert (numbers["train_images"], numbers["images"]) == (400, 180)
    assert [block["name"] for block in numbers["blocks"]] == ["block 0", "block 1"]
    x, y, queries, labels = _features(run)
    for k in (10, 100):
        model = KNeighborsClassifier(k, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
        expected = model.fit(x, y).score(queries, labels)
        assert numbers["blocks"][1][f"knn{k}_top1"] == pytest.approx(expected, abs=1e-9)
    for text in ("chance", "10-NN", "200-NN", "linear probe", "lr", "block 0", "then trained on all"):
        assert text in printed
    folder = run / "probe-val"
    assert {p.name for p in folder.iterdir()} == {"metrics.json", "features-block-0.png", "features-block-1.png"}
    assert Image.open(folder / "features-block-1.png").size[0] > 1000
    assert json.loads((folder / "metrics.json").read_text()) == numbers
    assert len(numbers["blocks"][0]["grid"]) == 40


def _features(run: Path) -> tuple[np.ndarray, ...]:
    from vit_scale.data.data import open_data
    from vit_scale.data.eval_images import limit_images

    loaded = vit_scale.load_run(run)
    data = open_data(loaded.config.data, seed=0)
    found = []
    for source in (limit_images(data.train, 400), data.val):
        images = torch.stack([loaded.transform(source.read(i).image) for i in range(len(source))])
        with torch.no_grad():
            tokens = loaded.model.forward_features(images)
            found.append(loaded.model.forward_head(tokens, pre_logits=True).double().numpy())
        found.append(np.array([source.read_target(i) for i in range(len(source))]))
    return tuple(found)


def test_headless_weights_and_those_with_a_classifier_have_the_same_features(
    run: Path, headless: Path, tmp_path: Path
) -> None:
    config = ["model.img_size=8", "model.patch_size=2", "model.layer_scale=1e-4", *QUICK]
    config += ["--model", "vit_mu", "--data", "embedded:digits"]
    found = probe(headless, *config, out=tmp_path / "p.json")["blocks"]
    (tmp_path / "with_head.safetensors").write_bytes((run / "model_ema.safetensors").read_bytes())
    assert probe(tmp_path / "with_head.safetensors", *config, out=tmp_path / "p.json")["blocks"] == found
    of_run = probe(run, *QUICK, "--out", tmp_path / "out", out=tmp_path / "p.json")
    assert of_run["blocks"] == found, "and as the run that they are from"
    assert not list(tmp_path.glob("probe-*")), "without a run nothing is written unless --out is set"


def test_training_images_leave_themselves_out(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = probe(run, "--split", "train", "--k", "1", *QUICK, "--out", tmp_path / "out", out=tmp_path / "p.json")
    assert numbers["leave_one_out"]
    assert numbers["images"] == numbers["train_images"] == 300
    assert numbers["blocks"][0]["knn1_top1"] < 1
    assert "linear_top1" not in numbers["blocks"][0]
    assert "never its own neighbor" in capsys.readouterr().out


def test_k_that_does_not_fit_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--images", "60", "data.workers=0", "--out", tmp_path / "out"]
    numbers = probe(run, *options, out=tmp_path / "p.json")
    assert numbers["skipped_k"] == [100, 200]
    assert "k = 100, 200 skipped: only 60 training images" in capsys.readouterr().out


def test_pooled_features_of_a_convolutional_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    save_file(create_model("timm/test_resnet", num_classes=0).state_dict(), tmp_path / "r.safetensors")
    options = ["--model", "timm/test_resnet", "--data", "embedded:digits", "model.img_size=32", "--images", "100"]
    numbers = probe(tmp_path / "r.safetensors", *options, "data.workers=0", out=tmp_path / "p.json")
    assert numbers["features"] == "pooled features"
    assert numbers["blocks"][0]["linear_top1"] > 2 * numbers["chance"]
    with pytest.raises(UserError, match="--blocks: timm/test_resnet is no ViT"):
        main([str(tmp_path / "r.safetensors"), *options, "--blocks", "1"])


def test_two_processes_give_the_same_numbers(
    run: Path, tmp_path: Path, launch_processes: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    script = ["launch/probe.py", str(run), "--images", "37", "batch.eval=4", "data.workers=0", "--k", "5"]
    together = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    together += ["--main_process_port", "0", "--mixed_precision", "no", "--num_machines", "1", *script]
    (done,) = launch_processes([*together, "--json", str(tmp_path / "2.json"), "--out", str(tmp_path / "2")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Top-1 accuracy") == 1
    alone = probe(*script[1:], "--out", tmp_path / "1", out=tmp_path / "1.json")
    assert json.loads((tmp_path / "2.json").read_text()) == alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/run"], "run not found"),
        (["{headless}"], "add --model NAME"),
        (["{headless}", "--model", "vit_mu", "model.layer_scale=1e-4", *PATCHES], "Add --data SOURCE"),
        (["{run}", "--data", "{unlabeled}"], "one directory per class|no label"),
        (["{run}", "--data", "no/such/folder"], "not found"),
        (["{run}", "--blocks", "4"], "--blocks 4: vit_mu has blocks 0 to 1"),
        (["{run}", "--blocks", "last"], "'last': expected numbers with commas"),
        (["{run}", "--k", "400", "--images", "300"], "--k 400: an image has only 300 other training images"),
        (["{run}", "--k", "0"], "'0': expected a number of at least 1"),
        (["{run}", "--split", "tset"], "split not found"),
        (["{run}", "--json", "no/such/folder/p.json"], "does not exist"),
        (["{run}", "data.streaming=true"], "streams are not supported"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_input_is_reported_and_nothing_is_written(
    arguments: list[str], message: str, run: Path, headless: Path, unlabeled: Path
) -> None:
    places = {"run": run, "headless": headless, "unlabeled": unlabeled}
    with pytest.raises(UserError, match=message) as raised:
        main([argument.format(**places) for argument in arguments])
    assert len(str(raised.value).splitlines()) <= 3
    assert not list(run.glob("probe-*"))


def test_blocks_from_the_end_are_read_as_a_value() -> None:
    args, overrides = parse(["runs/x", "--blocks", "-4,-1", "--k", "3,5", "model.img_size=32"])
    assert (args.blocks, args.k, overrides) == ([-4, -1], [3, 5], ["model.img_size=32"])


def test_principal_components_equal_those_of_scikit_learn() -> None:
    from sklearn.decomposition import PCA

    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7)
    components, explained = principal_components(rows, 3)
    model = PCA(3).fit(rows.double().numpy())
    expected = model.transform(rows.double().numpy())
    np.testing.assert_allclose(components.abs().numpy(), np.abs(expected), atol=1e-9)
    np.testing.assert_allclose(explained.numpy(), model.explained_variance_ratio_)
    assert principal_components(rows[:1], 3)[0].tolist() == [[0, 0]], "one image is a point"


def test_legend_names_the_largest_classes_and_counts_the_others() -> None:
    labels = torch.tensor([label for label in range(25) for _ in range(30 - label)])
    features = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(0))
    figure = projection_figure(features[:8], labels[:8], [f"c{i}" for i in range(25)], title="few")
    assert len(figure.axes) == 1, "t-SNE needs more images"
    axes = _pca_of(features, labels)
    names = axes.get_legend_handles_labels()[1]
    assert names == ["5 other classes", *(f"c{i}" for i in range(20))]


def _pca_of(features: torch.Tensor, labels: torch.Tensor):  # type: ignore[no-untyped-def]
    import vit_scale.probe.projection as projection

    before, projection._MIN_FOR_TSNE = projection._MIN_FOR_TSNE, 10**6
    try:
        return projection.projection_figure(features, labels, [f"c{i}" for i in range(25)], title="many").axes[0]
    finally:
        projection._MIN_FOR_TSNE = before
