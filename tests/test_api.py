"""`vit_scale.train` from Python."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import vit_scale
from vit_scale.errors import UserError

QUICK = {"track.wandb": "disabled", "data.workers": 0, "schedule.steps": 4, "schedule.warmup_steps": 0}


def train(recipe: Any, folder: Path, **changes: Any) -> vit_scale.LoadedRun:
    return vit_scale.train(recipe, QUICK | {"run.dir": str(folder)} | changes)


def test_training_returns_the_finished_run(root: Path, tmp_path: Path) -> None:
    run = train(root / "recipes/debug.yaml", tmp_path / "run", **{"optim.lr": 2e-3, "optim.betas": [0.9, 0.95]})
    assert run.folder == tmp_path / "run"
    assert run.class_names[:3] == ("0", "1", "2")
    assert json.loads((tmp_path / "run/summary.json").read_text())["finished"]
    options = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["optim"]
    assert (options["lr"], options["betas"]) == (2e-3, [0.9, 0.95])


def test_recipe_may_be_a_mapping_and_a_finished_run_is_returned_again(root: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((root / "recipes/debug.yaml").read_text())
    recipe["model"]["layer_scale"] = 1e-4  # PyYAML reads a string
    first = train(recipe, tmp_path / "run")
    again = train(recipe, tmp_path / "run")
    assert again.weights == first.weights


def test_strategy_and_precision_may_change_between_calls_even_after_an_error(root: Path, tmp_path: Path) -> None:
    recipe = root / "recipes/debug.yaml"
    with pytest.raises(UserError, match=r"model\.num_classes = 3"):
        train(recipe, tmp_path / "run", **{"model.num_classes": 3})
    with pytest.raises(UserError, match=r"model\.weights"):
        train(recipe, tmp_path / "run", **{"model.weights": "nowhere.safetensors", "parallel.strategy": "zero1"})
    train(recipe, tmp_path / "zero", **{"parallel.strategy": "zero1"})
    train(recipe, tmp_path / "run")
    strategies = [json.loads((tmp_path / name / "summary.json").read_text())["strategy"] for name in ("zero", "run")]
    assert strategies == ["zero1", "single"]
    assert not {"RANK", "WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED"} & set(os.environ)


def test_invalid_override_is_a_user_error(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean optim\.lr"):
        train(root / "recipes/debug.yaml", tmp_path / "run", **{"optim.lrr": 1.0})


def test_package_of_the_same_name_stays_importable() -> None:
    import vit_scale.train.loop

    assert callable(vit_scale.train)
    assert vit_scale.train.loop.train.__module__ == "vit_scale.train.loop"
