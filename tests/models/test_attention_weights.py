"""Attention maps against the attention that the model itself computes, ours and timm's."""

from __future__ import annotations

import pytest
import torch

from vit_scale.models import create_model
from vit_scale.models.attention_weights import attention_maps

SMALL = {"img_size": 16, "patch_size": 4, "num_classes": 3}


def images(size: int = 16) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"pos_embed": "rope"}, {"registers": 2, "qk_norm": True}])
def test_the_class_token_asks_where_there_is_one(options: dict) -> None:
    model = create_model("vit_mu", pool="cls", class_token=True, **SMALL, **options)
    weights = model.attention_weights(images())[-1]
    expected = weights.mean(1)[:, 0, model.num_prefix_tokens :]
    maps = attention_maps(model, images())
    assert maps is not None
    torch.testing.assert_close(maps, (expected / expected.sum(1, keepdim=True)).view(2, 4, 4))


def test_all_patches_ask_where_their_mean_is_what_the_head_sees() -> None:
    model = create_model("vit_mu", pool="mean", class_token=False, **SMALL)
    expected = model.attention_weights(images())[-1].mean((1, 2)).view(2, 4, 4)
    maps = attention_maps(model, images())
    assert maps is not None
    torch.testing.assert_close(maps, expected)


def test_maps_of_a_timm_model_equal_ours_with_the_same_weights() -> None:
    ours = create_model("vit_tiny_patch16_224", img_size=32, num_classes=3)
    theirs = create_model("timm/vit_tiny_patch16_224", img_size=32, num_classes=3)
    theirs.load_state_dict(ours.state_dict())
    mine, other = attention_maps(ours, images(32)), attention_maps(theirs, images(32))
    assert mine is not None
    assert other is not None
    torch.testing.assert_close(mine, other)


def test_a_model_without_such_attention_has_no_maps() -> None:
    assert attention_maps(create_model("timm/test_resnet", num_classes=3), images(64)) is None


def test_the_model_is_left_as_it_was() -> None:
    model = create_model("vit_mu", **SMALL).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    attention_maps(model, images())
    assert model.training
    assert not model.blocks[-1]._forward_pre_hooks
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
