"""Building a run."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image

from vit_scale.errors import UserError
from vit_scale.models.weights.whitening import TOKEN_STD
from vit_scale.recipe import load_recipe
from vit_scale.train.build import build_run

OPTIONS = ["model.init=whitened", "track.wandb=disabled", "schedule.steps=4", "schedule.warmup_steps=0"]


def test_whitened_patches_are_those_of_the_first_images_of_the_run(
    tmp_path: Path, root: Path, fresh_accelerate: None
) -> None:
    options = [*OPTIONS, "augment.progressive=[[0,4],[0.5,8]]", f"run.dir={tmp_path}/run"]
    run = build_run(load_recipe(root / "recipes/debug.yaml", options), "debug")
    try:
        (images,) = run.task.inputs(next(run.steps())[0], step=0).args
        with torch.no_grad():
            tokens = run.state.model.patch_embed(images)  # type: ignore[operator]
    finally:
        run.close()
    assert images.shape[-1] == 4
    assert tokens.std().item() == pytest.approx(TOKEN_STD, rel=0.3)


def test_whitening_needs_images_by_index(tmp_path: Path, root: Path) -> None:
    images = [Image.new("L", (8, 8), 40 * i) for i in range(4)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    for split in ("train", "validation"):
        rows = {"image": images, "label": [0, 1, 0, 1]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"images/{split}.parquet")
    options = [*OPTIONS, f"data.source={tmp_path}/images", "data.streaming=true", f"run.dir={tmp_path}/run"]
    with pytest.raises(UserError, match="model.init = 'whitened'.*streaming"):
        build_run(load_recipe(root / "recipes/debug.yaml", options), "debug")
    assert not (tmp_path / "run").exists()
