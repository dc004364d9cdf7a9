"""Progressive resizing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from vit_scale.data.progressive import Progressive, make_progressive
from vit_scale.errors import UserError
from vit_scale.models import create_model
from vit_scale.models.interface import ImageModel
from vit_scale.recipe import load_recipe
from vit_scale.train.build import build_run

PHASES = [(0.0, 16), (0.5, 24), (0.75, 32)]


def model(**options: Any) -> ImageModel:
    return cast(ImageModel, create_model("vit_mu", img_size=32, patch_size=8, **options))


def test_size_depends_on_the_fraction_of_the_run() -> None:
    progressive = Progressive(PHASES, steps=100)
    assert [progressive.size_at(step) for step in (0, 49, 50, 74, 75, 99)] == [16, 16, 24, 24, 32, 32]
    assert Progressive([(0.5, 24)], steps=100).size_at(10) is None


@pytest.mark.parametrize(
    ("phases", "step", "size"),
    [
        (PHASES, 75, 32),
        ([(0.0, 24), (0.5, 16)], 0, 24),
        ([(0.0, 16), (0.3, 32), (0.6, 24)], 30, 32),
        ([(0.5, 24)], 0, None),
        ([], 0, None),
        ([(0.0, 32), (0.001, 16)], 0, 16),
    ],
)
def test_largest_step_has_the_largest_images(phases: list[tuple[float, int]], step: int, size: int | None) -> None:
    progressive = Progressive(phases, steps=100)
    assert progressive.largest_step() == step
    assert progressive.size_at(step) == size


def test_images_are_resized_without_aliasing_and_unchanged_at_full_size() -> None:
    progressive = Progressive(PHASES, steps=100)
    stripes = torch.zeros(1, 3, 32, 32)
    stripes[..., ::2] = 1
    assert progressive(stripes, 80) is stripes
    small = progressive(stripes, 0)
    assert small.shape == (1, 3, 16, 16)
    assert (small[..., 2:-2] - 0.5).abs().max() < 0.1, "stripes of one pixel become gray"


def test_every_size_trains() -> None:
    net = model()
    progressive = make_progressive(PHASES, 100, net)
    for step in (0, 60, 90):
        net(progressive(torch.randn(2, 3, 32, 32), step)).sum().backward()
        assert net.pos_embed.grad.abs().sum() > 0  # type: ignore[union-attr, operator]
        net.zero_grad()


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([(0.5, 16), (0.2, 24)], "must increase"),
        ([(0.0, 20)], r"size 20 must be a multiple of the patch size \(8\)"),
        ([(0.0, 40)], "at most 32, the model's image size"),
    ],
)
def test_invalid_phases_are_rejected(phases: list[tuple[float, int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_progressive(phases, 100, model())


def test_models_with_a_fixed_size_are_rejected() -> None:
    with pytest.raises(UserError, match="supports only the image size of the model"):
        make_progressive(PHASES, 100, model(pos_embed="rope"))
    with pytest.raises(UserError, match="accepts images of one size only"):
        make_progressive([(0.0, 112)], 100, cast(ImageModel, create_model("timm/vit_tiny_patch16_224")))


def test_run_counts_the_flops_of_smaller_images(tmp_path: Path, root: Path, fresh_accelerate: None) -> None:
    phases = "augment.progressive=[[0,4],[0.5,8]]"
    options = [phases, f"run.dir={tmp_path}/run", "track.wandb=disabled", "schedule.steps=4", "schedule.warmup_steps=0"]
    run = build_run(load_recipe(root / "recipes/debug.yaml", options), "debug")
    try:
        flops = [run.cost.flops(run.task.progressive.size_at(step)) for step in range(4)]
        sizes = [run.task.inputs(next(run.steps())[0], step).args[0].shape[-1] for step in (0, 3)]
    finally:
        run.close()
    assert sizes == [4, 8]
    assert flops[0] == flops[1] < 0.4 * flops[2]
    assert flops[2] == flops[3] == run.plan.global_batch * run.cost.flops_per_image[None]
