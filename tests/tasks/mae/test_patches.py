"""Masks depend on (seed, position) alone, and patches have the layout of the paper's code."""

from __future__ import annotations

import pytest
import torch

from vit_scale.cost.closed_form import training_tokens
from vit_scale.models.variants import Variant
from vit_scale.tasks.mae.patches import (
    EVALUATION,
    TRAINING,
    count_kept,
    from_patches,
    kept_patches,
    masked_patches,
    patch_statistics,
    to_patches,
)


def test_masks_do_not_depend_on_the_batch() -> None:
    whole = kept_patches(3, torch.arange(100, 116), 36, 9, stream=TRAINING)
    parts = [kept_patches(3, positions, 36, 9, stream=TRAINING) for positions in torch.arange(100, 116).split(5)]
    assert torch.equal(whole, torch.cat(parts))
    backwards = kept_patches(3, torch.arange(115, 99, -1), 36, 9, stream=TRAINING)
    assert torch.equal(whole, backwards.flip(0))


def test_each_seed_position_and_stream_has_a_mask_of_its_own() -> None:
    masks = {
        tuple(row)
        for seed in (0, 1)
        for stream in (TRAINING, EVALUATION)
        for row in kept_patches(seed, torch.arange(64), 36, 9, stream=stream).tolist()
    }
    assert len(masks) == 2 * 2 * 64


def test_all_patches_are_masked_equally_often() -> None:
    keep = kept_patches(0, torch.arange(4000), 16, 4, stream=TRAINING)
    kept = (~masked_patches(keep, 16)).float().mean(0)
    assert (kept - 0.25).abs().max() < 0.03


@pytest.mark.parametrize("padding", [torch.tensor([5, -1, -1])])
def test_padding_has_a_mask_of_the_same_size(padding: torch.Tensor) -> None:
    assert masked_patches(kept_patches(0, padding, 16, 4, stream=EVALUATION), 16).sum(1).tolist() == [12, 12, 12]


def test_patches_are_rows_of_pixels_with_their_channels_together() -> None:
    images = torch.randn(2, 3, 4, 6)
    patches = to_patches(images, (2, 3))
    assert patches.shape == (2, 4, 18)
    # the second patch of the second row; pixel by pixel, each with its channels
    expected = [images[1, c, 2 + p, 3 + q] for p in range(2) for q in range(3) for c in range(3)]
    assert torch.equal(patches[1, 3], torch.stack(expected))
    assert torch.equal(from_patches(patches, (2, 3), (2, 2)), images)


def test_variance_of_a_patch_is_unbiased() -> None:
    mean, std = patch_statistics(torch.tensor([[[1.0, 3.0]], [[5.0, 5.0]]]))
    assert mean.flatten().tolist() == [2.0, 5.0]
    assert std.flatten().tolist() == pytest.approx([(2 + 1e-6) ** 0.5, 1e-3])


@pytest.mark.parametrize("side", [2, 6, 8, 14])
def test_kept_patches_are_as_many_as_the_cost_model_counts(side: int) -> None:
    variant = Variant(img_size=(side, side), patch_size=(1, 1), embed_dim=8, depth=1, num_heads=1, class_token=False)
    for percent in range(1, 100):
        kept = count_kept(side * side, percent / 100)
        tokens = 1 - percent / 100
        assert training_tokens(variant, 1 - tokens) == max(1, kept)
