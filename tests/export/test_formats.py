"""Exports load in their target library and reproduce the model's outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import vit_scale
from vit_scale.commands.export import main
from vit_scale.errors import UserError
from vit_scale.export.hub_folder import export_hub_folder
from vit_scale.export.timm_weights import export_timm, to_timm
from vit_scale.export.verify import largest_difference, staged
from vit_scale.inference.loaded_run import LoadedRun, build_loaded
from vit_scale.models import create_model
from vit_scale.recipe import build_config

NAMES = ("cat", "dog", "eel")


def loaded(name: str, **options: Any) -> LoadedRun:
    """Return a model with random weights, none of them zero."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=3, **options)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    config = build_config({"model": {"name": name, **options}, "schedule": {"steps": 1}})
    return build_loaded(config, model.state_dict(), source="a test", names=NAMES)


SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_cifar_small", {"depth": 1}),
        ("vit_mu", {"pool": "mean", "class_token": False, "layer_scale": 0.1, "in_chans": 4}),
        ("vit_mu", {"pos_embed": "sincos"}),
        ("vit_mu", {"pos_embed": "learned_2d", "registers": 2}),
        ("vit_mu", {"pos_embed": "none", "qk_norm": True, "img_size": (16, 32)}),
        ("vit_mu", {"mlp": "swiglu", "in_chans": 1}),
        ("vit_mu", {"distilled": True, "qkv_bias": False}),
        ("vit_base_patch16_224", SMALL),
        ("deit3_small_patch16_224", SMALL | {"drop_path": 0.3}),
        ("timm/test_vit", {"img_size": 64, "drop_path": 0.1}),
        ("timm/test_resnet", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_timm_loads_every_variant_from_a_file_and_a_directory(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    import timm

    run = loaded(name, **options)
    exported = export_timm(run, tmp_path / "w.safetensors")
    assert exported.difference < 1e-4
    scope: dict[str, Any] = {}
    exec(exported.usage, scope)
    assert largest_difference(run, scope["model"].eval()) < 1e-4, "the printed code works"
    assert export_hub_folder(run, tmp_path / "hub").difference < 1e-4
    again = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True)
    assert tuple(again.pretrained_cfg["label_names"]) == NAMES
    assert again.pretrained_cfg["mean"] == run.transform.mean or list(again.pretrained_cfg["mean"]) == list(
        run.transform.mean
    )


@pytest.mark.parametrize("kind", ["rope", "relative"])
def test_models_unsupported_by_timm_are_rejected(kind: str) -> None:
    with pytest.raises(UserError, match=f"pos_embed = {kind}.*--to onnx"):
        to_timm(loaded("vit_mu", pos_embed=kind))


@pytest.mark.parametrize("name", ["vit_mu", "timm/test_resnet"])
@pytest.mark.parametrize("form", ["onnx", "torch-export"])
def test_graphs_accept_any_batch_size_and_describe_their_images(name: str, form: str, tmp_path: Path) -> None:
    from vit_scale.export.onnx_file import export_onnx
    from vit_scale.export.torch_export import export_torch

    run = loaded(name, **({"pos_embed": "rope"} if name == "vit_mu" else {}))
    images = torch.randn(7, 3, *run.model.img_size)
    if form == "onnx":
        import onnxruntime

        assert export_onnx(run, tmp_path / "m.onnx").difference < 1e-3
        session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
        logits = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
        names = session.get_modelmeta().custom_metadata_map["class_names"]
    else:
        assert export_torch(run, tmp_path / "m.pt2").difference < 1e-4
        extra = {"class_names": ""}
        logits = torch.export.load(tmp_path / "m.pt2", extra_files=extra).module()(images)
        names = extra["class_names"]
    torch.testing.assert_close(logits, run.model(images), atol=1e-3, rtol=1e-3)
    assert tuple(json.loads(names)) == NAMES
    assert {path.name for path in tmp_path.iterdir()} <= {"m.onnx", "m.pt2"}, "no partial files are left"


def test_export_that_differs_is_deleted(tmp_path: Path) -> None:
    run = loaded("vit_mu")

    def export() -> None:
        with staged(tmp_path / "w.onnx") as path:
            path.write_text("something")
            largest_difference(run, lambda images: run.model(images) + 0.1)

    with pytest.raises(UserError, match="differs from the original by"):
        export()
    assert list(tmp_path.iterdir()) == []


def test_nan_is_a_difference() -> None:
    run = loaded("vit_mu")
    with pytest.raises(UserError, match="differs"):
        largest_difference(run, lambda images: run.model(images) * float("nan"))


# ----------------------------------------------------------------------------------------------------------- model card


@pytest.fixture(scope="module")
def hub(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "digits"
    export_hub_folder(vit_scale.load_run(trained_run), folder)
    return folder


def test_model_card_has_results_recipe_and_versions_but_no_local_paths(hub: Path, trained_run: Path) -> None:
    card = (hub / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    summary = json.loads((trained_run / "summary.json").read_text())
    assert header["license"] == "unknown"
    assert {"timm", "image-classification"} <= set(header["tags"])
    result = header["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert result == pytest.approx(100 * summary["val_ema/top1"], abs=1e-3)
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, flags=re.DOTALL).group(1))
    assert recipe["ema"] == {"decay": 0.9}
    assert recipe["run"] == {"seed": 0}
    assert summary["versions"]["torch"] in card
    assert str(trained_run) not in card


def test_code_in_the_model_card_runs(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (hub / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, flags=re.DOTALL).group(1)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    printed: list[Any] = []
    exec(code.replace("path/to/this/directory", str(hub)), {"print": printed.append})
    assert printed[0] in "0123456789"


# -------------------------------------------------------------------------------------------------------------- command


def test_command_reports_the_verification(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(trained_run), "--to", "timm", "--out", str(tmp_path / "w.safetensors"), "--weights", "raw"]) == 0
    output = capsys.readouterr().out
    assert "Verified: loaded by timm.create_model" in output
    assert re.search(r"maximum logit difference \d", output)
    assert "raw weights" in output
    assert "timm.create_model('vit_tiny_patch16_224', checkpoint_path=" in output


class FakeHub:
    """Stub of huggingface_hub's HfApi."""

    def __init__(self, calls: list[tuple], logged_in: bool = True):
        self.calls, self.logged_in = calls, logged_in

    def whoami(self) -> dict[str, str]:
        if not self.logged_in:
            raise OSError("no token\nmore lines")
        return {"name": "me"}

    def create_repo(self, repo: str, **options: Any) -> str:
        self.calls.append(("create", repo, options["private"]))
        return f"https://hub/{repo}"

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> None:
        self.calls.append(("upload", repo_id, {path.name for path in Path(folder_path).iterdir()}))


def test_push_uploads_the_verified_folder(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    calls: list[tuple] = []
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: FakeHub(calls))
    out = tmp_path / "digits"
    assert main([str(trained_run), "--to", "hub-folder", "--out", str(out), "--push", "me/digits", "--private"]) == 0
    files = {"README.md", "config.json", "model.safetensors"}
    assert calls == [("create", "me/digits", True), ("upload", "me/digits", files)]
    assert "Uploaded to https://hub/me/digits" in capsys.readouterr().out
    assert 'create_model("hf-hub:me/digits"' in (out / "README.md").read_text()


def test_push_without_a_login_writes_and_uploads_nothing(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple] = []
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: FakeHub(calls, logged_in=False))
    with pytest.raises(UserError, match=r"not logged in.*\(no token\)\.\nRun `hf auth login`"):
        main([str(trained_run), "--to", "hub-folder", "--out", str(tmp_path / "x"), "--push", "me/digits"])
    assert calls == []
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "--to", "tensorflow"], "invalid choice: 'tensorflow'.*onnx"),
        (["{run}"], "--to"),
        (["no/such/run", "--to", "timm"], "run not found"),
        (["{run}", "--to", "onnx", "--out", "model.bin"], "writes a .onnx file, e.g. model.onnx"),
        (["{run}", "--to", "onnx", "--push", "me/x"], "requires --to hub-folder"),
        (["{run}", "--to", "hub-folder", "--push", "a/b/c"], "invalid repository name"),
        (["{run}", "--to", "timm", "--private"], "requires --push"),
        (["{run}", "--to", "timm", "--out", "{file}/w.safetensors"], "cannot write"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_input_is_reported(arguments: list[str], message: str, trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    paths = {"run": trained_run, "file": tmp_path / "file"}
    with pytest.raises(UserError, match=message):
        main([argument.format(**paths) for argument in arguments])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not (trained_run / "export").exists()
