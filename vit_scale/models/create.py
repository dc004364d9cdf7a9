"""Create a model from a name and options: construct, initialize, load weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from vit_scale.config import ModelConfig
from vit_scale.errors import UserError, nearest
from vit_scale.models.attention import check_attention_kernel
from vit_scale.models.timm_models import create_timm_model
from vit_scale.models.variants import TIMM_PREFIX, Variant, is_grouped, resolve_variant
from vit_scale.models.vit import VisionTransformer
from vit_scale.models.weights.freeze import freeze
from vit_scale.models.weights.init import init_weights
from vit_scale.models.weights.load import load_weights


def create_model(name: str, **options: Any) -> nn.Module:
    """Create a model by name: a variant of the table, or `timm/<any timm model>`.

    Every field of `ModelConfig` is a keyword argument of the same name; None keeps the variant's own value. With
    `weights`, print which tensors were kept, resized and skipped.

        create_model("vit_base_patch16_224", num_classes=10, drop_path=0.2)
    """
    known = [field.name for field in dataclasses.fields(ModelConfig)]
    for option in options:
        if option not in known:
            near = nearest(option, known, n=3)
            raise TypeError(f"create_model() has no option {option!r}; did you mean {', '.join(near or known)}?")
    try:
        config = ModelConfig(name=name, **options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("model", *first["loc"][:1]))
        raise UserError(f"{where} = {first['input']!r}: {first['msg']}.") from error
    model = construct_model(config)
    init_weights(model, config.init)
    if config.weights is not None:
        print(load_weights(model, config.weights).summary())
    return model


def construct_from_config(config: ModelConfig, *, num_classes: int, in_chans: int) -> nn.Module:
    """Construct the model of a recipe; the data determine what the recipe leaves open.

    The caller initializes it and loads `model.weights`, in the way of its strategy.
    """
    return construct_model(with_data_sizes(config, num_classes=num_classes, in_chans=in_chans))


def with_data_sizes(config: ModelConfig, *, num_classes: int, in_chans: int) -> ModelConfig:
    """Return `config` with the classes and channels of the data if it does not set its own."""
    return dataclasses.replace(
        config,
        num_classes=num_classes if config.num_classes is None else config.num_classes,
        in_chans=config.in_chans or in_chans,
    )


def construct_model(config: ModelConfig) -> nn.Module:
    """Construct the modules of a model; `init_weights` initializes them. timm models initialize themselves."""
    model = _construct_unfrozen(config)
    freeze(model, config.freeze)
    return model


def _construct_unfrozen(config: ModelConfig) -> nn.Module:
    if config.name.startswith(TIMM_PREFIX):
        return create_timm_model(config)
    variant = resolve_variant(config)
    check_kernel(config, variant)
    if config.patch_dropout and is_grouped(variant):
        raise UserError(
            f"model.attention = {variant.attention} and model.patch_dropout = {config.patch_dropout:g} exclude each "
            "other: groups of patches need every patch. Set model.patch_dropout=0, or model.attention=full or linear."
        )
    return VisionTransformer(
        variant,
        drop_path=config.drop_path,
        drop_path_schedule=config.drop_path_schedule,
        drop_path_mode=config.drop_path_mode,
        patch_dropout=config.patch_dropout,
        kernel=config.kernel,
    )


def check_kernel(config: ModelConfig, variant: Variant) -> None:
    """Try the kernel on the device where the model will run: the accelerator if there is one, otherwise the CPU."""
    if config.kernel == "flex" and not is_grouped(variant):
        raise UserError(
            f"model.kernel = flex: FlexAttention computes model.attention = window, dilated and block, not "
            f"{variant.attention}; use auto."
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    check_attention_kernel(
        config.kernel,
        accelerator or "cpu",
        # GPUs train in half precision, for which the fast kernels are made.
        dtype=torch.float16 if accelerator else torch.float32,
        head_dim=variant.embed_dim // variant.num_heads,
        dropout=variant.attn_dropout,
        bias=variant.pos_embed == "relative",
    )
