"""Our ViT computes what timm's does, with timm's random weights: features, logits, and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vit_scale.kernels import cpu
from vit_scale.models import create_model
from vit_scale.models.timm_models import counterpart_options, create_counterpart

OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "distilled": {"distilled": True},
    "registers": {"registers": 4},
    "mean pooling": {"pool": "mean"},
    "mean pooling without class token": {"pool": "mean", "class_token": False, "registers": 2},
    "max pooling": {"pool": "max"},
    "every token": {"pool": "tokens"},
    "layer scale": {"layer_scale": 0.1},
    "qk norm": {"qk_norm": True},
    "rectangular image and patch": {"img_size": (24, 40), "patch_size": (8, 4)},
    "one channel": {"in_chans": 1},
    "swiglu": {"mlp": "swiglu", "mlp_ratio": 3.0},
    "no biases": {"qkv_bias": False, "bias": False},
    "no positions": {"pos_embed": "none"},
    "explicit attention": {"kernel": "explicit"},
    "checkpointed": {},
}


@pytest.fixture(autouse=True, params=[False, True], ids=["small", "as large"])
def computed_as_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch, as for small models, and with our kernels, as for large ones."""
    if request.param:
        monkeypatch.setattr(cpu, "WORTHWHILE_MACS", 0)
        monkeypatch.setattr(cpu, "WORTHWHILE_ELEMENTS", 0)


def pair(**options: object) -> tuple[nn.Module, nn.Module]:
    """Our model and timm's, with the same weights, none of them a special value such as 0 or 1."""
    torch.manual_seed(0)
    ours = create_model("vit_mu", **options)
    timms = create_counterpart(ours.variant)
    with torch.no_grad():
        for parameter in timms.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    ours.load_state_dict(timms.state_dict(), strict=True)
    return ours, timms


def images(model: nn.Module, batch: int = 3) -> Tensor:
    return torch.randn(batch, model.in_chans, *model.img_size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", OPTIONS)
def test_features_logits_and_gradients_equal_timm(name: str) -> None:
    ours, timms = pair(**OPTIONS[name])
    if name == "checkpointed":
        ours.set_activation_checkpointing("full")
    x = images(ours)
    ours.train(), timms.train()
    features, expected = ours.forward_features(x), timms.forward_features(x)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=0)
    logits, expected = ours(x), timms(x)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    for output in (logits, expected):
        output.square().mean().backward()
    timm_gradients = {key: parameter.grad for key, parameter in timms.named_parameters()}
    assert timm_gradients.keys() == dict(ours.named_parameters()).keys()
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, timm_gradients[key], atol=1e-4, rtol=0, msg=key)


@pytest.mark.parametrize("name", OPTIONS)
def test_state_dicts_load_strictly_both_ways(name: str) -> None:
    ours, timms = pair(**OPTIONS[name])
    fresh = create_model("vit_mu", **OPTIONS[name])
    timms.load_state_dict(fresh.state_dict(), strict=True)
    torch.testing.assert_close(timms.eval()(images(fresh)), fresh.eval()(images(fresh)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_cifar_small"])
def test_named_models_equal_timm(name: str) -> None:
    torch.manual_seed(0)
    ours = create_model(name).eval()
    timms = create_counterpart(ours.variant).eval()
    ours.load_state_dict(timms.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(images(ours, 1)), timms(images(ours, 1)), atol=1e-5, rtol=0)


def test_distilled_training_returns_both_heads_as_timm_does() -> None:
    ours, timms = pair(distilled=True)
    ours.train(), timms.train()
    ours.distilled_training = timms.distilled_training = True
    for output, expected in zip(ours(images(ours)), timms(images(ours)), strict=True):
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "norm"), [("plain", True), ("registers", False), ("rectangular image and patch", True)]
)
def test_intermediate_features_equal_timm(name: str, norm: bool) -> None:
    ours, timms = pair(**OPTIONS[name])
    x = images(ours)
    found = ours.eval().forward_intermediates(x, [0, -1], norm=norm, return_prefix_tokens=True)
    expected = timms.eval().forward_intermediates(
        x, [0, -1], norm=norm, return_prefix_tokens=True, intermediates_only=True
    )
    for (maps, prefix), (timm_maps, timm_prefix) in zip(found, expected, strict=True):
        torch.testing.assert_close(maps, timm_maps, atol=1e-5, rtol=0)
        torch.testing.assert_close(prefix, timm_prefix, atol=1e-5, rtol=0)


def test_relative_bias_equals_timm() -> None:
    from timm.layers import RelPosBias

    ours = create_model("vit_mu", pos_embed="relative").blocks[0].attn.rel_pos
    timms = RelPosBias((4, 4), num_heads=2, prefix_tokens=1)
    timms.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(), timms.get_bias())


def test_rotary_embedding_equals_timm_up_to_the_order_of_channels() -> None:
    """timm rotates neighboring channels, we rotate the two halves of a head; attention scores are the same."""
    from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat

    from vit_scale.models.layers.pos_embed import RotaryEmbedding

    q, k = torch.randn(2, 1, 1, 12, 16)
    timms = RotaryEmbeddingCat(
        16, temperature=100.0, in_pixels=False, feat_shape=[3, 4], grid_indexing="ij"
    ).get_embed()
    expected = apply_rot_embed_cat(q, timms) @ apply_rot_embed_cat(k, timms).transpose(-2, -1)
    ours = RotaryEmbedding((3, 4), 0, 16)
    halves = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    found = ours(q[..., halves]) @ ours(k[..., halves]).transpose(-2, -1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_timm_initialization_has_the_same_std_as_timm() -> None:
    torch.manual_seed(0)
    ours = create_model("vit_cifar_small", depth=2, init="timm")
    timms = create_counterpart(ours.variant)
    for (key, mine), theirs in zip(ours.named_parameters(), timms.parameters(), strict=True):
        assert mine.std(correction=0).item() == pytest.approx(theirs.std(correction=0).item(), rel=0.2, abs=1e-7), key
        assert mine.mean().item() == pytest.approx(theirs.mean().item(), abs=0.01), key


@pytest.mark.parametrize("size", [(16, 16), (24, 40)])
def test_images_of_any_size_as_timm_with_dynamic_size(size: tuple[int, int]) -> None:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    ours = create_model("vit_mu", num_classes=5, img_size=32, patch_size=8).eval()
    options = counterpart_options(ours.variant)  # type: ignore[arg-type]
    theirs = VisionTransformer(**options, dynamic_img_size=True).eval()
    theirs.load_state_dict(ours.state_dict())
    ours.allow_any_size()
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=0)
