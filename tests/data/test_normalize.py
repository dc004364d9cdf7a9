"""Normalization on the device."""

from __future__ import annotations

import pytest
import torch

from vit_scale.config import DataConfig
from vit_scale.data.normalize import Normalize, buffer_for, resolve_normalization
from vit_scale.errors import UserError


def test_against_torchvision() -> None:
    from torchvision.transforms.v2 import functional

    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    mean, std = resolve_normalization(DataConfig(mean="imagenet", std="imagenet"), "vit_small_patch16_224", 3)
    expected = functional.normalize(images.float() / 255, list(mean), list(std))
    torch.testing.assert_close(Normalize(mean, std)(images), expected, atol=1e-5, rtol=1e-5)


def test_memory_is_reused_only_on_request() -> None:
    images = torch.randint(0, 256, (2, 1, 4, 4), dtype=torch.uint8)
    normalize = Normalize((0.5,), (0.5,))
    expected = normalize(images)
    assert normalize(images).data_ptr() != expected.data_ptr()
    buffer = buffer_for(images, None)
    assert buffer is not None
    assert normalize(images, out=buffer) is buffer
    assert torch.equal(buffer, expected)
    assert buffer_for(images + 1, buffer) is buffer
    smaller = buffer_for(images[:1], buffer)
    assert smaller is not None
    assert smaller.shape == (1, 1, 4, 4)


@pytest.mark.parametrize("model", ["vit_small_patch16_224", "timm/vit_base_patch16_224", "timm/resnet50"])
def test_auto_matches_the_published_weights(model: str) -> None:
    import timm

    published = timm.get_pretrained_cfg(model.removeprefix("timm/"))
    assert resolve_normalization(DataConfig(), model, 3) == (published.mean, published.std)


def test_names_values_and_other_channels() -> None:
    name = "vit_small_patch16_224"
    assert resolve_normalization(DataConfig(mean="none", std="none"), name, 3) == ((0, 0, 0), (1, 1, 1))
    assert resolve_normalization(DataConfig(mean=(0.1, 0.2), std=(0.3, 0.4)), name, 2) == ((0.1, 0.2), (0.3, 0.4))
    mean, std = resolve_normalization(DataConfig(mean="imagenet", std="imagenet"), name, 1)
    assert mean == pytest.approx((0.449,), abs=1e-3)
    assert std == pytest.approx((0.226,), abs=1e-3)


def test_values_that_do_not_match_the_channels_are_rejected() -> None:
    with pytest.raises(UserError, match=r"data.mean=\[0.5\]: 1 values, but images have 3 channels"):
        resolve_normalization(DataConfig(mean=(0.5,)), "vit_small_patch16_224", 3)
