"""Layers, the ViT, the table of variants, and weights in and out of timm's format.

`create_model` is loaded on first use, so that checking a model's name does not import torch.
"""

from typing import TYPE_CHECKING, Any

from vit_scale.models.variants import VARIANTS, Variant, check_model_name

if TYPE_CHECKING:
    from vit_scale.models.create import construct_from_config, create_model

__all__ = ["VARIANTS", "Variant", "check_model_name", "construct_from_config", "create_model"]


def __getattr__(name: str) -> Any:
    if name in ("construct_from_config", "create_model"):
        from vit_scale.models import create

        return getattr(create, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
