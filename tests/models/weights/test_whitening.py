"""Whitening patch projection."""

from __future__ import annotations

import pytest
import torch

from vit_scale.errors import UserError
from vit_scale.models import create_model
from vit_scale.models.weights.whitening import TOKEN_STD, whiten_patches


def blurred(images: int, size: int) -> torch.Tensor:
    """Noise with correlated neighboring pixels, as in photographs."""
    coarse = torch.randn(images, 3, size // 4, size // 4)
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")
    return smooth + 0.3 * torch.randn(images, 3, size, size)


def tokens_of(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    return model.patch_embed(images).flatten(0, 1)  # type: ignore[operator]


def test_tokens_have_equal_variance_in_all_directions() -> None:
    torch.manual_seed(0)
    images = blurred(400, 16)
    model = create_model("vit_mu", img_size=16, patch_size=4, embed_dim=64)
    whiten_patches(model, images)
    with torch.no_grad():
        tokens = tokens_of(model, images)
    assert tokens.std().item() == pytest.approx(TOKEN_STD, rel=0.1)
    spread = torch.linalg.svdvals(tokens)[:48]
    assert spread.max() / spread.min() < 1.3


def test_tokens_of_random_weights_have_unequal_variance() -> None:
    torch.manual_seed(0)
    images = blurred(400, 16)
    model = create_model("vit_mu", img_size=16, patch_size=4, embed_dim=64)
    with torch.no_grad():
        spread = torch.linalg.svdvals(tokens_of(model, images))[:48]
    assert spread.max() / spread.min() > 5, "otherwise there is nothing to whiten"


def test_narrow_tokens_preserve_the_strongest_directions() -> None:
    torch.manual_seed(0)
    images = blurred(400, 16)
    model = create_model("vit_mu", img_size=16, patch_size=8, embed_dim=32)
    whiten_patches(model, images)
    patches = torch.nn.functional.unfold(images, 8, stride=8).transpose(1, 2).flatten(0, 1)
    _, vectors = torch.linalg.eigh(patches.T @ patches)
    rows = model.patch_embed.proj.weight.detach().flatten(1)  # type: ignore[union-attr]
    outside = rows @ vectors[:, :-32]
    assert outside.norm() < 1e-3 * rows.norm()


def test_model_without_a_patch_projection_is_rejected() -> None:
    with pytest.raises(UserError, match="no plain patch projection"):
        whiten_patches(create_model("timm/resnet18", num_classes=10), torch.randn(2, 3, 32, 32))
