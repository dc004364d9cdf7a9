"""`load_run`: a run, finished or not, as a model, a transform and class names."""

from __future__ import annotations

import io
import json
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
from vit_scale.data.loading.loaders import EvalLoader
from vit_scale.data.sources.table_source import open_data
from vit_scale.errors import UserError
from vit_scale.models import create_model

LAST = "checkpoints/step-00000012"


@pytest.fixture
def unfinished(trained_run: Path, tmp_path: Path) -> Path:
    """The run as it was before its last step: checkpoints, but no final weights."""
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


def test_a_run_is_ready_to_use_in_three_lines(trained_run: Path, tmp_path: Path) -> None:
    Image.new("L", (20, 30), 128).save(tmp_path / "seven.png")
    run = vit_scale.load_run(trained_run)
    logits = run.model(run.transform(tmp_path / "seven.png")[None])
    assert run.class_names[logits.argmax()] in "0123456789"
    assert logits.shape == (1, 10)
    assert not run.model.training
    assert not any(p.requires_grad for p in run.model.parameters())


def test_the_average_is_loaded_unless_raw_weights_are_asked_for(trained_run: Path) -> None:
    assert_same(vit_scale.load_run(trained_run).model.state_dict(), load_file(trained_run / "model_ema.safetensors"))
    raw = vit_scale.load_run(trained_run, weights="raw")
    assert_same(raw.model.state_dict(), load_file(trained_run / "model.safetensors"))


def test_a_checkpoint_gives_the_weights_that_the_finished_run_has(trained_run: Path, unfinished: Path) -> None:
    for kind in ("ema", "raw"):
        final = vit_scale.load_run(trained_run, weights=kind)
        for path in (unfinished, unfinished / LAST):
            loaded = vit_scale.load_run(path, weights=kind)
            assert_same(loaded.model.state_dict(), final.model.state_dict())
            assert loaded.class_names == final.class_names
            assert loaded.folder == unfinished


def test_a_run_gone_on_with_gives_its_newest_checkpoint_and_not_its_old_end(
    unfinished: Path, trained_run: Path
) -> None:
    shutil.copy(trained_run / "model.safetensors", unfinished)
    found = find_run_weights(unfinished)
    assert (found.path, found.step) == (unfinished / LAST, 12)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(unfinished: Path) -> None:
    (unfinished / LAST / "model.safetensors").write_bytes(b"half")
    assert find_run_weights(unfinished).step == 8
    with pytest.raises(UserError, match="not a whole checkpoint: model.safetensors has 4 bytes"):
        vit_scale.load_run(unfinished / LAST)


def test_the_average_is_put_together_from_the_shards_of_several_processes(unfinished: Path) -> None:
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


def test_the_transform_shows_the_model_what_evaluation_shows_it(trained_run: Path) -> None:
    run = vit_scale.load_run(trained_run)
    source = open_data(run.config.data, seed=0).val
    size = {"img_size": run.model.img_size, "in_chans": 1, "batch": 8}
    images, _, _ = next(iter(EvalLoader(source, augment=run.config.augment, rank=0, world=1, workers=0, **size)))
    ours = torch.stack([run.transform(source.read(i).image) for i in range(8)])
    assert torch.equal(ours, run.transform.normalize(images))


def test_paths_pillow_images_arrays_and_bytes_are_alike(trained_run: Path, tmp_path: Path) -> None:
    transform = vit_scale.load_run(trained_run).transform
    pixels = np.random.default_rng(0).integers(0, 256, (16, 11), dtype=np.uint8)
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    image.save(tmp_path / "a.png")
    image.save(buffer, "png")
    expected = transform(tmp_path / "a.png")
    assert expected.shape == (1, 8, 8)
    for form in (str(tmp_path / "a.png"), image, pixels, buffer.getvalue()):
        assert torch.equal(transform(form), expected)


def test_a_pillow_image_is_turned_upright_and_left_as_it_was(trained_run: Path) -> None:
    transform = vit_scale.load_run(trained_run).transform
    sideways = Image.fromarray(np.tile(np.arange(0, 160, 10, dtype=np.uint8), (16, 1)))
    upright = transform(sideways.rotate(-90, expand=True))
    sideways.getexif()[0x0112] = 6
    assert torch.equal(transform(sideways), upright)
    assert sideways.getexif()[0x0112] == 6


def test_a_broken_image_is_named(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"\x89PNG, not")
    with pytest.raises(UserError, match=r"bad\.png: cannot be decoded"):
        vit_scale.load_run(trained_run).transform(tmp_path / "bad.png")


def test_another_image_size_resamples_the_positions(trained_run: Path) -> None:
    run = vit_scale.load_run(trained_run, overrides=["model.img_size=16"])
    assert run.model(run.transform(np.zeros((16, 16), np.uint8))[None]).shape == (1, 10)
    assert run.model.pos_embed.shape[1] == 65


def test_fine_tuning_starts_from_a_run_that_is_still_going_on(unfinished: Path) -> None:
    run = vit_scale.load_run(unfinished)
    shape = {"img_size": 8, "patch_size": 2, "in_chans": 1, "layer_scale": 1e-4}
    model = create_model("vit_mu", weights=str(unfinished), num_classes=3, **shape)
    assert torch.equal(model.blocks[0].attn.qkv.weight, run.model.blocks[0].attn.qkv.weight)
    report = vit_scale.load_weights(model, unfinished / LAST)
    assert set(report.initialized) == {"head.weight", "head.bias"}


def test_there_is_no_such_run(tmp_path: Path, trained_run: Path) -> None:
    with pytest.raises(UserError, match="there is no such run"):
        vit_scale.load_run(tmp_path / "nothing")
    with pytest.raises(UserError, match=f"There are {trained_run}"):
        vit_scale.load_run(trained_run.parent / "rnu")


def test_a_folder_that_is_no_run_and_a_lone_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the folder of a run"):
        vit_scale.load_run(tmp_path)
    (tmp_path / "w.safetensors").touch()
    with pytest.raises(UserError, match="does not tell its model"):
        vit_scale.load_run(tmp_path / "w.safetensors")


def test_a_run_without_weights_yet_says_so(unfinished: Path) -> None:
    shutil.rmtree(unfinished / "checkpoints")
    with pytest.raises(UserError, match="no weights yet"):
        vit_scale.load_run(unfinished)


def test_an_average_that_was_not_kept_is_not_made_up(trained_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained_run, tmp_path / "run"))
    (folder / "model_ema.safetensors").unlink()
    with pytest.raises(UserError, match="kept no averaged weights"):
        vit_scale.load_run(folder, weights="ema")
    assert "raw" in vit_scale.load_run(folder).weights


def test_weights_of_another_model_are_refused(trained_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained_run, tmp_path / "run"))
    save_file(create_model("vit_mu", depth=1).state_dict(), folder / "model_ema.safetensors")
    with pytest.raises(UserError, match="another architecture|not the weights of vit_mu"):
        vit_scale.load_run(folder)


def test_a_run_of_an_earlier_version_loads(trained_run: Path, tmp_path: Path) -> None:
    """Its options say `model.attention` for what is `model.kernel` today."""
    folder = Path(shutil.copytree(trained_run, tmp_path / "run"))
    for path in (folder / "config.yaml", folder / LAST / "meta.json"):
        text = path.read_text()
        assert text.count("kernel") == 1
        path.write_text(text.replace("kernel", "attention"))
    assert vit_scale.load_run(folder).config.model.kernel == "auto"
    checkpoint_file = folder / LAST / "model.safetensors"  # Options from the checkpoint's meta.json.
    assert vit_scale.load_run(checkpoint_file).config.model.kernel == "auto"
