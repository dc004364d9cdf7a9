"""From a name and options to a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from vit_scale.config import ModelConfig
from vit_scale.errors import UserError, nearest
from vit_scale.models.attention import check_attention_backend
from vit_scale.models.timm_models import create_timm_model
from vit_scale.models.variants import TIMM_PREFIX, Variant, get_variant
from vit_scale.models.vit import VisionTransformer
from vit_scale.models.weights.load import load_weights


def create_model(name: str, **options: Any) -> nn.Module:
    """A model by name: a variant of the table, or `timm/<any timm model>`.

    Every field of `ModelConfig` is a keyword argument of the same name; None keeps the variant's own. With `weights`,
    an account of what was kept, resized and skipped is printed.

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
    model = _create(config)
    if config.weights is not None:
        print(load_weights(model, config.weights).summary())
    return model


def create_from_config(config: ModelConfig, *, num_classes: int, in_chans: int) -> nn.Module:
    """The model of a recipe; the data say how many classes and channels where the recipe does not.

    `model.weights` is left to the caller and `load_weights`, whose account only one process should print.
    """
    return _create(
        dataclasses.replace(
            config,
            num_classes=config.num_classes or num_classes,
            in_chans=config.in_chans or in_chans,
        )
    )


def resolve_variant(config: ModelConfig) -> Variant:
    """The row of the table with the options of a recipe in place, checked."""
    variant = get_variant(config.name)
    changes = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(Variant)
        if getattr(config, field.name, None) is not None
    }
    for size in ("img_size", "patch_size"):
        if isinstance(changes.get(size), int):
            changes[size] = (changes[size], changes[size])
    variant = dataclasses.replace(variant, **changes)
    _check(variant)
    return variant


def _create(config: ModelConfig) -> nn.Module:
    if config.name.startswith(TIMM_PREFIX):
        return create_timm_model(config)
    variant = resolve_variant(config)
    _check_backend(config, variant)
    return VisionTransformer(
        variant,
        drop_path=config.drop_path,
        drop_path_schedule=config.drop_path_schedule,
        drop_path_mode=config.drop_path_mode,
        patch_dropout=config.patch_dropout,
        attention=config.attention,
        init=config.init,
    )


def _check(variant: Variant) -> None:
    for side, pixels, patch in zip(("height", "width"), variant.img_size, variant.patch_size, strict=True):
        if pixels % patch or pixels < patch:
            below, above = pixels // patch * patch, (pixels // patch + 1) * patch
            near = f"{below} or {above}" if below else f"{above}"
            raise UserError(f"model.img_size: patches of {patch} do not fill a {side} of {pixels}; take {near}.")
    if variant.embed_dim % variant.num_heads:
        raise UserError(f"model.num_heads = {variant.num_heads} does not divide model.embed_dim = {variant.embed_dim}.")
    head_dim = variant.embed_dim // variant.num_heads
    if variant.pos_embed == "rope" and head_dim % 4:
        raise UserError(f"model.pos_embed = rope needs heads whose width is a multiple of 4, not {head_dim}.")
    if variant.pos_embed == "sincos" and variant.embed_dim % 4:
        raise UserError(f"model.pos_embed = sincos needs a width that is a multiple of 4, not {variant.embed_dim}.")
    if variant.pool == "cls" and not variant.class_token:
        raise UserError("model.pool = cls needs a class token: set model.class_token=true, or pool the mean.")
    if variant.distilled and (variant.pool != "cls"):
        raise UserError(f"model.distilled = true has heads on two tokens; it does not go with pool = {variant.pool}.")


def _check_backend(config: ModelConfig, variant: Variant) -> None:
    """Try the kernel where the model will run: on the accelerator if there is one, else on the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    check_attention_backend(
        config.attention,
        accelerator or "cpu",
        # GPUs train in half precision, for which the fast kernels are made.
        dtype=torch.float16 if accelerator else torch.float32,
        head_dim=variant.embed_dim // variant.num_heads,
        dropout=variant.attn_dropout,
        bias=variant.pos_embed == "relative",
    )
