"""The teacher's logits, computed once: the same as in each step, in any pieces, and only for fixed images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from safetensors.torch import load_file

import vit_scale
from tests.tasks.distill.students import losses, student
from vit_scale.data.data import Data, open_data
from vit_scale.data.sample_images import load_sample_images
from vit_scale.data.sampling import sample_index
from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import load_run
from vit_scale.recipe import build_config
from vit_scale.schedule import make_plan
from vit_scale.tasks.distill import logit_cache
from vit_scale.tasks.distill.distillation import Distillation
from vit_scale.tasks.distill.logit_cache import CHUNK, open_cache

FIXED = {"crop": "none", "interpolation": "bicubic", "hflip": 0.0, "mixup": 0.0, "cutmix": 0.0, "eval_crop": 1.0}


def recipe(teacher: Path, cache_dir: Path, **distill: Any) -> dict[str, Any]:
    options = {"kind": "soft", "cache": True} | distill
    return student(teacher, augment=FIXED, data={"cache_dir": str(cache_dir)}, distill=options, schedule={"steps": 3})


def prepared(teacher: Path, cache_dir: Path) -> tuple[Distillation, Data]:
    config = build_config(recipe(teacher, cache_dir))
    data = open_data(config.data, seed=0)
    task = Distillation(config, data.info, make_plan(config, train_images=data.info.images, processes=1, device="cpu"))
    task.prepare(data)
    return task, data


def test_cached_logits_train_like_computed_ones(teacher: Path, tmp_path: Path) -> None:
    for name, cache in (("cached", True), ("computed", False)):
        vit_scale.train(recipe(teacher, tmp_path, cache=cache), [f"run.dir={tmp_path / name}"])
    for cached, computed in zip(losses(tmp_path / "cached"), losses(tmp_path / "computed"), strict=True):
        assert cached == pytest.approx(computed, abs=1e-5)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("cached", "computed"))
    assert all(abs(ours[key] - theirs[key]).max() < 1e-5 for key in ours)


def test_logits_are_those_of_each_image_and_survive_an_interruption(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, data = prepared(teacher, tmp_path)
    table = open_cache(task, data, workers=0).table
    images = load_sample_images(data.train, 50, augment=task.config.augment, img_size=(8, 8), in_chans=1)
    index = np.unique(np.linspace(0, len(data.train) - 1, 50).astype(np.int64))
    seen = F.interpolate(images / 255, (12, 12), mode="bicubic", antialias=True)
    expected = load_run(teacher).model((seen - 0.3) / 0.4).numpy()
    np.testing.assert_allclose(table[index], expected, rtol=0, atol=1e-4)

    whole = np.array(table)
    (directory,) = tmp_path.glob("teacher-*[!.lock]")
    done = np.memmap(directory / "done.bin", np.uint8, mode="r+")
    done[[2, len(done) - 1]] = 0  # as if it had been killed
    table[:] = -1
    table.flush(), done.flush()
    computed: list[int] = []
    original = logit_cache._logits
    monkeypatch.setattr(
        logit_cache, "_logits", lambda task, batch: computed.append(len(batch.images)) or original(task, batch)
    )
    again = open_cache(*prepared(teacher, tmp_path), workers=0)
    assert computed == [CHUNK, CHUNK], "only what was missing"
    for chunk in range(len(done)):
        rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        expected = whole[rows] if chunk in (2, len(done) - 1) else -np.ones_like(whole[rows])
        assert np.array_equal(again.table[rows], expected)


def test_each_position_has_the_logits_of_its_image(teacher: Path, tmp_path: Path) -> None:
    import torch

    numbers = np.arange(30, dtype=np.float32)[:, None]
    positions = torch.arange(70)
    for repeats in (1, 3):
        found = logit_cache.LogitCache(numbers, seed=5, repeats=repeats).logits(positions)
        assert found[:, 0].tolist() == sample_index(5, positions.numpy(), 30, repeats).tolist()


@pytest.mark.parametrize(
    ("section", "option", "value"),
    [
        ("augment", "crop", "random_resized"),
        ("augment", "interpolation", "random"),
        ("augment", "hflip", 0.5),
        ("augment", "rand_augment", "rand-m9"),
        ("augment", "erase", 0.25),
        ("augment", "mixup", 0.8),
        ("augment", "cutmix", 1.0),
        ("augment", "color_jitter", 0.3),
        ("augment", "three_augment", True),
        ("data", "on_error", "skip"),
        ("data", "balance", True),
        ("distill", "features", [[0, 0]]),
    ],
)
def test_option_that_varies_the_images_is_named(
    teacher: Path, tmp_path: Path, section: str, option: str, value: object
) -> None:
    options = recipe(teacher, tmp_path)
    options[section] |= {option: value}
    config = build_config(options)
    plan = make_plan(config, train_images=100, processes=1, device="cpu")
    with pytest.raises(UserError, match=f"{section}.{option}") as caught:
        Distillation(config, open_data(config.data, seed=0).info, plan)
    assert str(caught.value).startswith("distill.cache = true: ")
    assert len(str(caught.value).splitlines()) <= 3
    named = [
        name for name in ("crop", "hflip", "mixup", "cutmix", "erase") if f"augment.{name} = " in str(caught.value)
    ]
    assert named in ([], [option]), "no other option is blamed"


def test_directory_that_cannot_be_written_is_reported(teacher: Path, tmp_path: Path) -> None:
    task, data = prepared(teacher, tmp_path)
    (tmp_path / "full").write_text("")
    directory = tmp_path / "full" / "below"
    config = build_config(recipe(teacher, directory))
    task.config = config
    with pytest.raises(UserError, match="data.cache_dir"):
        open_cache(task, data, workers=0)
