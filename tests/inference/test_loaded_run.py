"""`load_run`: model, transform, task and class names of a run, finished or in progress."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vit_scale
from vit_scale.checkpoints.run_weights import RunWeights, find_run_weights
from vit_scale.data.augment.transforms import EvalTransform
from vit_scale.data.data import open_data
from vit_scale.data.loading.loaders import EvalLoader, Loading
from vit_scale.data.sampling import EvalIndices
from vit_scale.data.targets import ClassTarget
from vit_scale.errors import UserError
from vit_scale.models import create_model

LAST = "checkpoints/step-00000012"


@pytest.fixture
def unfinished(trained_run: Path, tmp_path: Path) -> Path:
    """A run in progress: checkpoints, but no final weights."""
    folder = Path(shutil.copytree(trained_run, tmp_path / "run"))
    for path in folder.glob("model*.safetensors"):
        path.unlink()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"finished": False}))
    return folder


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_run_is_ready_to_use_in_three_lines(trained_run: Path, tmp_path: Path) -> None:
    Image.new("L", (20, 30), 128).save(tmp_path / "seven.png")
    run = vit_scale.load_run(trained_run)
    logits = run.model(run.transform(tmp_path / "seven.png")[None])
    assert run.class_names[logits.argmax()] in "0123456789"
    assert logits.shape == (1, 10)
    assert not run.model.training
    assert not any(p.requires_grad for p in run.model.parameters())


def test_ema_weights_are_loaded_unless_raw_is_requested(trained_run: Path) -> None:
    assert_same(vit_scale.load_run(trained_run).model.state_dict(), load_file(trained_run / "model_ema.safetensors"))
    raw = vit_scale.load_run(trained_run, weights="raw")
    assert_same(raw.model.state_dict(), load_file(trained_run / "model.safetensors"))


def test_last_checkpoint_has_the_final_weights(trained_run: Path, unfinished: Path) -> None:
    for kind in ("ema", "raw"):
        final = vit_scale.load_run(trained_run, weights=kind)
        for path in (unfinished, unfinished / LAST):
            loaded = vit_scale.load_run(path, weights=kind)
            assert_same(loaded.model.state_dict(), final.model.state_dict())
            assert loaded.class_names == final.class_names
            assert loaded.folder == unfinished


def test_resumed_run_gives_its_latest_checkpoint_and_not_its_earlier_final_weights(
    unfinished: Path, trained_run: Path
) -> None:
    shutil.copy(trained_run / "model.safetensors", unfinished)
    found = find_run_weights(unfinished)
    assert (found.path, found.step) == (unfinished / LAST, 12)


def test_corrupt_checkpoint_is_skipped(unfinished: Path) -> None:
    (unfinished / LAST / "model.safetensors").write_bytes(b"half")
    assert find_run_weights(unfinished).step == 8
    with pytest.raises(UserError, match="invalid checkpoint: model.safetensors has 4 bytes"):
        vit_scale.load_run(unfinished / LAST)


def test_ema_weights_are_assembled_from_shards(unfinished: Path) -> None:
    checkpoint = unfinished / LAST
    whole = RunWeights(checkpoint, "ema").read()
    shard = checkpoint / "shard-00000.safetensors"
    with safe_open(shard, framework="pt") as file:
        pieces = {key: file.get_tensor(key) for key in json.loads(file.metadata()["starts"]) if key.startswith("ema/")}
    shard.unlink()
    for rank in range(2):
        mine = {key: piece.reshape(-1).tensor_split(2)[rank].clone() for key, piece in pieces.items()}
        starts = {key: rank * (piece.numel() + 1) // 2 for key, piece in pieces.items()}
        metadata = {"starts": json.dumps(starts), "numbers": "{}"}
        save_file(mine, checkpoint / f"shard-{rank:05d}.safetensors", metadata)
    assert_same(RunWeights(checkpoint, "ema").read(), whole)


def test_transform_equals_that_of_evaluation(trained_run: Path) -> None:
    run = vit_scale.load_run(trained_run)
    source = open_data(run.config.data, seed=0).val
    transform, indices = EvalTransform(run.config.augment, run.model.img_size), EvalIndices(images=len(source), batch=8)
    batch = next(iter(EvalLoader(source, transform, indices, ClassTarget(), Loading(channels=1))))
    ours = torch.stack([run.transform(source.read(i).image) for i in range(8)])
    assert torch.equal(ours, run.transform.normalize(batch.images))


def test_paths_pillow_images_arrays_and_bytes_give_the_same_tensor(trained_run: Path, tmp_path: Path) -> None:
    transform = vit_scale.load_run(trained_run).transform
    pixels = np.random.default_rng(0).integers(0, 256, (16, 11), dtype=np.uint8)
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    image.save(tmp_path / "a.png")
    image.save(buffer, "png")
    expected = transform(tmp_path / "a.png")
    assert expected.shape == (1, 8, 8)
    for form in (str(tmp_path / "a.png"), image, pixels, buffer.getvalue()):
        assert torch.equal(transform(form), expected)


def test_exif_rotation_is_applied_to_a_copy(trained_run: Path) -> None:
    transform = vit_scale.load_run(trained_run).transform
    sideways = Image.fromarray(np.tile(np.arange(0, 160, 10, dtype=np.uint8), (16, 1)))
    upright = transform(sideways.rotate(-90, expand=True))
    sideways.getexif()[0x0112] = 6
    assert torch.equal(transform(sideways), upright)
    assert sideways.getexif()[0x0112] == 6


def test_corrupt_image_is_named(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"\x89PNG, not")
    with pytest.raises(UserError, match=r"bad\.png: cannot be decoded"):
        vit_scale.load_run(trained_run).transform(tmp_path / "bad.png")


def test_other_image_size_resamples_position_embeddings(trained_run: Path) -> None:
    run = vit_scale.load_run(trained_run, overrides=["model.img_size=16"])
    assert run.model(run.transform(np.zeros((16, 16), np.uint8))[None]).shape == (1, 10)
    assert run.model.pos_embed.shape[1] == 65


def test_fine_tuning_starts_from_a_run_in_progress(unfinished: Path) -> None:
    run = vit_scale.load_run(unfinished)
    shape = {"img_size": 8, "patch_size": 2, "in_chans": 1, "layer_scale": 1e-4}
    model = create_model("vit_mu", weights=str(unfinished), num_classes=3, **shape)
    assert torch.equal(model.blocks[0].attn.qkv.weight, run.model.blocks[0].attn.qkv.weight)
    report = vit_scale.load_weights(model, unfinished / LAST)
    assert set(report.initialized) == {"head.weight", "head.bias"}


def test_missing_run_is_reported_with_nearby_runs(tmp_path: Path, trained_run: Path) -> None:
    with pytest.raises(UserError, match="run not found"):
        vit_scale.load_run(tmp_path / "nothing")
    with pytest.raises(UserError, match=f"Runs: {trained_run}"):
        vit_scale.load_run(trained_run.parent / "rnu")


def test_other_directory_and_single_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a run directory"):
        vit_scale.load_run(tmp_path)
    (tmp_path / "w.safetensors").touch()
    with pytest.raises(UserError, match="does not define its model"):
        vit_scale.load_run(tmp_path / "w.safetensors")


def test_run_without_weights_is_reported(unfinished: Path) -> None:
    shutil.rmtree(unfinished / "checkpoints")
    with pytest.raises(UserError, match="no weights yet"):
        vit_scale.load_run(unfinished)


def test_missing_ema_weights_are_reported(trained_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained_run, tmp_path / "run"))
    (folder / "model_ema.safetensors").unlink()
    with pytest.raises(UserError, match="no EMA weights"):
        vit_scale.load_run(folder, weights="ema")
    assert "raw" in vit_scale.load_run(folder).weights


def test_weights_of_another_model_are_rejected(trained_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained_run, tmp_path / "run"))
    save_file(create_model("vit_mu", depth=1).state_dict(), folder / "model_ema.safetensors")
    with pytest.raises(UserError, match="another architecture|not the weights of vit_mu"):
        vit_scale.load_run(folder)


def test_a_run_of_an_earlier_version_loads(trained_run: Path, tmp_path: Path) -> None:
    """Its options say `model.attention` for what is `model.kernel` today."""
    folder = Path(shutil.copytree(trained_run, tmp_path / "run"))
    for path in (folder / "config.yaml", folder / LAST / "meta.json"):
        text = re.sub(r'\s"?attention"?: "?full"?,?', "", path.read_text())
        assert "kernel" in text
        path.write_text(text.replace("kernel", "attention"))
    assert vit_scale.load_run(folder).config.model.kernel == "auto"
    checkpoint_file = folder / LAST / "model.safetensors"  # Options from the checkpoint's meta.json.
    assert vit_scale.load_run(checkpoint_file).config.model.kernel == "auto"
