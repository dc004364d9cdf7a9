"""Attention maps against the attention that the model itself computes, ours and timm's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vit_scale.errors import UserError
from vit_scale.models import create_model
from vit_scale.models.attention_weights import attention_maps, attention_weights
from vit_scale.models.timm_models import create_counterpart

SMALL = {"img_size": 16, "patch_size": 4, "num_classes": 3}


def images(size: int = 16) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"pos_embed": "rope"}, {"registers": 2, "qk_norm": True}])
def test_map_of_a_model_with_class_token_uses_its_query(options: dict) -> None:
    model = create_model("vit_mu", pool="cls", class_token=True, **SMALL, **options)
    *_, weights = attention_weights(model, images())
    expected = weights.mean(1)[:, 0, model.num_prefix_tokens :]
    maps = attention_maps(model, images())
    assert maps is not None
    torch.testing.assert_close(maps, (expected / expected.sum(1, keepdim=True)).view(2, 4, 4))


def test_map_of_a_model_with_mean_pooling_averages_the_queries() -> None:
    model = create_model("vit_mu", pool="mean", class_token=False, **SMALL)
    *_, weights = attention_weights(model, images())
    expected = weights.mean((1, 2)).view(2, 4, 4)
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


def test_weights_of_every_block_equal_those_that_timm_applies() -> None:
    """timm's explicit attention drops weights by a module, whose input a hook shows."""
    ours = create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, depth=3)
    theirs = create_counterpart(dataclasses.replace(ours.variant, timm_name=None)).eval()
    theirs.load_state_dict(ours.state_dict())
    applied: list[torch.Tensor] = []
    for block in theirs.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _module, inputs, _out: applied.append(inputs[0]))
    theirs(images(32))
    for model in (ours, theirs):
        for found, expected in zip(attention_weights(model, images(32)), list(applied), strict=True):
            torch.testing.assert_close(found, expected)


def test_one_block_at_a_time_is_computed() -> None:
    model, ran = create_model("vit_mu", depth=3, **SMALL), []
    weights = attention_weights(model, images())
    next(weights)
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
    next(weights)
    assert ran == [0]
    next(weights)
    assert ran == [0, 1]


def test_compiled_blocks_and_other_image_sizes_work() -> None:
    model = create_model("vit_mu", **SMALL)
    (expected,) = attention_weights(model, images(24)[..., :16, :16], start=-1)
    model.compile_blocks(backend="eager")
    (found,) = attention_weights(model, images(24)[..., :16, :16], start=-1)
    torch.testing.assert_close(found, expected)
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    model.allow_any_size()
    assert [weights.shape for weights in attention_weights(model, images(24))] == [(2, 2, 37, 37)] * 2
    maps = attention_maps(model, images(24))
    assert maps is not None
    assert maps.shape == (2, 6, 6)


def test_model_without_patch_attention_has_no_maps_and_no_weights() -> None:
    model = create_model("timm/test_resnet", num_classes=3)
    assert attention_maps(model, images(64)) is None
    with pytest.raises(UserError, match="no plain ViT attention blocks"):
        next(attention_weights(model, images(64)))


def test_model_is_not_changed() -> None:
    model = create_model("vit_mu", **SMALL).train()
    model.blocks[0].eval()  # as for a frozen part of a model
    before = {name: p.clone() for name, p in model.named_parameters()}
    attention_maps(model, images())
    assert model.training
    assert [block.training for block in model.blocks] == [False, True]
    assert not model.blocks[-1]._forward_pre_hooks
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
