"""A small masked autoencoder, shared by the tests of its task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vit_scale.config import Config
from vit_scale.data.batch import Batch, DataInfo
from vit_scale.recipe import build_config
from vit_scale.tasks.mae.masked_autoencoding import MaskedAutoencoding

TINY = {
    "task": {"name": "mae"},
    "model": {"name": "vit_mu", "img_size": 16, "patch_size": 4},
    "mae": {"decoder_dim": 16, "decoder_depth": 2, "decoder_heads": 2},
    "schedule": {"steps": 8},
}


@pytest.fixture(scope="session")
def mae_config() -> Callable[..., Config]:
    """Return the options of a small masked autoencoder with some changed."""

    def make(*changes: str, **sections: dict[str, Any]) -> Config:
        return build_config({name: TINY.get(name, {}) | sections.get(name, {}) for name in TINY | sections}, changes)

    return make


@pytest.fixture(scope="session")
def mae_task(mae_config: Callable[..., Config]) -> Callable[..., MaskedAutoencoding]:
    """Return the task of these options, for color images."""

    def make(*changes: str, **sections: dict[str, Any]) -> MaskedAutoencoding:
        return MaskedAutoencoding(mae_config(*changes, **sections), DataInfo(64, 3))

    return make


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Batch]:
    """Return a batch of noise images at some positions."""

    def make(positions: torch.Tensor, size: tuple[int, int] = (16, 16), channels: int = 3) -> Batch:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (len(positions), channels, *size), dtype=torch.uint8, generator=generator)
        return Batch(images, {}, positions)

    return make
