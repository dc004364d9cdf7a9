"""Features are the tokens that timm returns, pooled; they come in the order of the images."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vit_scale.data.batch import Batch
from vit_scale.errors import UserError
from vit_scale.models import create_model
from vit_scale.probe.features import FeatureModel, compute_features

SMALL = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10}
TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}


def ours(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_mu", **(SMALL | options)).eval()


def images(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, model.in_chans, *model.img_size, generator=generator)


@pytest.mark.parametrize(
    "options",
    [{"pool": "cls", "class_token": True, "registers": 2}, {"pool": "mean", "registers": 1}, {"pool": "tokens"}],
    ids=str,
)
def test_default_features_are_what_the_head_receives(options: dict) -> None:
    model = ours(**options)
    x = images(model)
    (features,) = FeatureModel(model)(x)
    with torch.no_grad():
        tokens = model.forward_features(x)
        expected = model.forward_head(tokens, pre_logits=True)
        expected = tokens[:, model.num_prefix_tokens :].mean(1) if expected.ndim == 3 else expected
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_each_block_passes_the_last_norm_and_registers_are_excluded() -> None:
    model = ours(pool="cls", class_token=True, registers=2)
    x = images(model)
    extract = FeatureModel(model, [0, -1], "both")
    assert extract.names == ["block 0", f"block {model.depth - 1}"]
    with torch.no_grad():
        pairs = model.forward_intermediates(x, [0, -1], as_maps=False, return_prefix_tokens=True, norm=True)
    for features, (patches, prefix) in zip(extract(x), pairs, strict=True):
        torch.testing.assert_close(features, torch.cat([prefix[:, 0], patches.mean(1)], 1), rtol=1e-4, atol=1e-5)
    assert FeatureModel(model, [1, 1 - model.depth]).blocks == [1], "a block is judged once"


def timm_vit(**options: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(**(TIMM | options)).eval()


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_timms_vits(pool: str) -> None:
    """timm's `avg` normalizes the mean; `map` is attention pooling, for which the mean is the default."""
    model = timm_vit(global_pool=pool, reg_tokens=2)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    extract = FeatureModel(model, [1, 2])
    assert extract.pooling == ("cls" if pool == "token" else "mean")
    with torch.no_grad():
        pairs = model.forward_intermediates(
            x, [1, 2], return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
        )
        for features, (patches, prefix) in zip(extract(x), pairs, strict=True):
            expected = model.fc_norm(prefix[:, 0] if pool == "token" else patches.mean(1))
            torch.testing.assert_close(features, expected)


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_efficientnet", "test_vit2", "Eva", "Xcit"])
def test_timms_families(name: str) -> None:
    import timm

    if name[0].isupper():
        model = getattr(importlib.import_module(f"timm.models.{name.lower()}"), name)(**TIMM).eval()
    else:
        model = timm.create_model(name, num_classes=0).eval()
    x = torch.randn(2, 3, *getattr(model, "pretrained_cfg", {"input_size": (3, 32, 32)})["input_size"][1:])
    (features,) = FeatureModel(model)(x)
    with torch.no_grad():
        torch.testing.assert_close(features, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "blocks", "pooling", "message"),
    [
        ({}, [9], None, "--blocks 9: tiny has blocks 0 to 3"),
        ({}, [0, -5], None, "--blocks -5: tiny has blocks 0 to 3 .negative: from the end."),
        ({"class_token": False, "pool": "mean"}, None, "cls", "--features cls: tiny has no class token; use .* mean"),
        ({"class_token": False, "pool": "mean"}, None, "both", "--features both: tiny has no class token"),
    ],
)
def test_missing_blocks_and_tokens_are_reported(options: dict, blocks: Any, pooling: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FeatureModel(ours(depth=4, **options), blocks, pooling, name="tiny")


@pytest.mark.parametrize(("blocks", "pooling", "option"), [([0], None, "--blocks"), (None, "mean", "--features")])
def test_network_without_blocks_is_reported(blocks: Any, pooling: Any, option: str) -> None:
    import timm

    with pytest.raises(UserError, match=f"{option}: resnet is no ViT"):
        FeatureModel(timm.create_model("test_resnet"), blocks, pooling, name="resnet")


def test_images_that_are_padding_are_dropped_and_the_model_stays_in_its_mode() -> None:
    model = ours().train()
    x = images(model)
    batches = [
        Batch(x, {"label": torch.tensor([5, 6, 7])}, torch.tensor([0, -1, 2])),
        Batch(x * 2, {"label": torch.tensor([8, 0, 0])}, torch.tensor([3, -1, -1])),
    ]
    found = compute_features(FeatureModel(model), batches, lambda batch: batch.images, torch.device("cpu"))
    assert found.labels.tolist() == [5, 7, 8]
    assert found.indices.tolist() == [0, 2, 3]
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    (features,) = found.features.values()
    torch.testing.assert_close(features[2], FeatureModel(model.eval())(x * 2)[0][0])
