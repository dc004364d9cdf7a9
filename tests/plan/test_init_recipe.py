"""`vit-scale init` on three kinds of data, from the folder to a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from vit_scale.commands.init import default_path, main
from vit_scale.errors import UserError
from vit_scale.plan import init_recipe as init
from vit_scale.plan.look_at_data import DataFacts
from vit_scale.plan.suggest import fine_tuned
from vit_scale.recipe import load_recipe

SPEED = 400.0


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, no network, and a system whose speed does not vary."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "is_hub_reachable", lambda: False)
    monkeypatch.setattr(init, "has_weights", lambda name: False)
    monkeypatch.setattr(init, "images_per_second", lambda config, data: SPEED)
    return tmp_path


def write_images(folder: Path, classes: int, each: int, mode: str, side: int) -> Path:
    """Write images whose mean color depends on their class."""
    rng = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(each):
            shape = (side, side) if mode == "L" else (side, side, 3)
            pixels = rng.integers(0, 60, shape) + 190 * label // classes
            suffix = "jpg" if side > 100 else "png"
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"class{label}" / f"{number}.{suffix}")
    return folder


@pytest.mark.parametrize(
    ("kind", "img_size", "channels"),
    [("many small images", 24, 3), ("few large photographs", 96, 3), ("grayscale", 28, 1)],
)
def test_recipe_suits_the_images(kind: str, img_size: int, channels: int, here: Path) -> None:
    images = {
        "many small images": lambda: write_images(here / "data", 5, 60, "RGB", 32),
        "few large photographs": lambda: write_images(here / "data", 3, 8, "RGB", 300),
        "grayscale": lambda: write_images(here / "data", 4, 30, "L", 28),
    }
    folder = images[kind]()
    assert main([str(folder), "--minutes", "1"]) == 0
    config = load_recipe(here / "data.yaml")
    assert config.data.source == str(folder)
    assert config.model.img_size == img_size
    assert (config.augment.hflip == 0) == (channels == 1)


def test_recipe_trains_well_as_it_is(here: Path, fresh_accelerate: None) -> None:
    from vit_scale.train.run_recipe import run_recipe

    write_images(here / "data", 3, 60, "L", 12)
    assert main(["data", "--minutes", "0.1"]) == 0
    config = load_recipe("data.yaml", ["track.wandb=disabled", "run.dir=run"])
    assert run_recipe(config, "data.yaml") == 0
    assert json.loads(Path("run/summary.json").read_text())["best/val/top1"] > 0.8


PHOTOS = DataFacts({"source": "photos"}, 5_000, 500, {"cat": 2_500, "dog": 2_500}, 3, (480, 640), 5e-3)


def test_models_that_do_not_fit_in_memory_are_not_suggested() -> None:
    published = list(fine_tuned())
    assert init.fitting(published, PHOTOS, 64 * 2**30) == (published, None)
    base_needs_more, note = init.fitting(published, PHOTOS, 2**30)
    assert {candidate.model["name"] for candidate in base_needs_more} == {
        "vit_small_patch16_224",
        "vit_tiny_patch16_224",
    }
    assert note == "Too large for 1.00 GiB of memory: vit_base_patch16_224."
    assert init.fitting(published, PHOTOS, 1)[0] == published[-1:]


def test_memory_includes_weights_gradients_optimizer_state_and_ema() -> None:
    base = next(fine_tuned())
    assert 20 * 85.8e6 < init.training_memory(base, PHOTOS) < 30 * 85.8e6


def test_speed_is_measured_on_the_images_themselves(fresh_accelerate: None) -> None:
    from vit_scale.data.data import open_data
    from vit_scale.plan.measure_speed import images_per_second
    from vit_scale.recipe import build_config

    options = {"name": "vit_mu", "img_size": 8, "patch_size": 2}
    config = build_config({"model": options, "schedule": {"epochs": 1}, "batch": {"global": 16}})
    assert 1 < images_per_second(config, open_data(config.data, seed=0), seconds=0.1) < 1e6


def test_next_commands_and_progress_are_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(here / "my photos", 2, 5, "RGB", 32)
    assert main(["my photos"]) == 0
    output = capsys.readouterr().out
    assert "Reading my photos ..." in output
    assert "Training from scratch" in output
    assert "Warning: class class1 has only" in output
    for command in (" train my-photos.yaml", "--try", " eval runs/my-photos "):
        assert command in output
    finished = here / "runs/my-photos"
    finished.mkdir(parents=True)
    (finished / "config.yaml").write_text("{}")
    (finished / "summary.json").write_text('{"finished": true}')
    assert main(["my photos", "--force"]) == 0
    assert " eval runs/my-photos-2 " in capsys.readouterr().out, "where the next run will be"


def test_options_of_the_data_become_part_of_the_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(here / "data/pets", 2, 5, "RGB", 32)
    write_images(here / "data/wild", 1, 5, "RGB", 32)
    (here / "data/wild/class0").rename(here / "data/wild/class2")
    with pytest.raises(UserError, match="data.class_level=1"):
        main(["data"])
    assert main(["data", "data.class_level=2", "--data.mean=[0.5,0.5,0.5]", "--minutes", "1"]) == 0
    config = load_recipe("data.yaml")
    assert (config.data.class_level, config.data.mean) == (2, (0.5, 0.5, 0.5))
    assert "15 classes" not in capsys.readouterr().out
    for wrong, message in (("optim.lr=1", "edit the recipe"), ("data.clas_level=2", "data.class_level")):
        with pytest.raises(UserError, match=message):
            main(["data", wrong, "--force"])


def test_existing_file_is_overwritten_only_with_force(here: Path) -> None:
    write_images(here / "data", 2, 5, "RGB", 32)
    Path("data.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"data.yaml already exists: .*--force"):
        main(["data"])
    assert Path("data.yaml").read_text() == "mine"
    assert main(["data", "--force"]) == 0
    assert load_recipe("data.yaml").data.source == "data"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FOLDER"),
        (["no/such/folder"], "directory not found"),
        (["empty"], "no images"),
        (["data", "--minutes", "0"], "--minutes 0"),
        (["data", "--out", "recipe.json"], "must end in .yaml"),
        (["file.txt"], "is a file"),
    ],
)
def test_invalid_input_is_reported_and_nothing_written(arguments: list[str], message: str, here: Path) -> None:
    (here / "empty").mkdir()
    (here / "file.txt").touch()
    with pytest.raises(UserError, match=message):
        main(arguments)
    assert not list(here.glob("**/*.yaml"))


def test_default_file_is_in_recipes_if_there_is_such_a_directory(here: Path) -> None:
    assert default_path("uoft-cs/cifar10") == Path("cifar10.yaml")
    (here / "recipes").mkdir()
    assert default_path("a/b c/") == Path("recipes/b-c.yaml")
    assert default_path(".") == Path(f"recipes/{here.name}.yaml")


def test_published_weights_in_the_cache_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DataFacts({"source": "x"}, 300, 60, {"a": 150, "b": 150}, 3, (300, 300), 1e-3)
    monkeypatch.setattr(init, "has_weights", lambda name: "tiny" in name)
    assert {model.weights for model in init.available_models(facts)} == {"timm/vit_tiny_patch16_224.augreg_in21k"}


def test_a_model_that_turns_out_slow_is_replaced_by_a_smaller_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(here / "data", 2, 100, "RGB", 32)
    monkeypatch.setattr(init, "images_per_second", lambda config, data: 1.0)
    assert main(["data", "--minutes", "1"]) == 0
    assert load_recipe("data.yaml").model.depth == 4


def test_gpus_are_counted_with_their_peak_in_the_precision_that_auto_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80_000_000_000)
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    found = init.machine_facts()
    assert (found.name, found.devices, found.memory) == ("8 x NVIDIA A100-SXM4-80GB", 8, 80_000_000_000)
    assert found.flops == 8 * 312e12
