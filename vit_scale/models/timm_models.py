"""Any timm model by name, with the attributes and methods that the rest of the project requires.

The class of timm's module is extended, not wrapped, so that its state dict keeps timm's names.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import nn

from vit_scale.config import ModelConfig
from vit_scale.errors import UserError
from vit_scale.models.interface import full_shape
from vit_scale.models.variants import TIMM_PREFIX, Variant, check_model_name
from vit_scale.models.weights.freeze import keep_frozen_in_eval

# Ours on the left, timm's on the right. `dropout` is timm's --drop: before the head, in some models also inside.
_PASSED_ON = {
    "drop_path": "drop_path_rate",
    "dropout": "drop_rate",
    "attn_dropout": "attn_drop_rate",
    "patch_dropout": "patch_drop_rate",
    "patch_size": "patch_size",
}
_READ_ELSEWHERE = {"name", "weights", "freeze", "num_classes", "in_chans", "img_size"}
# Values of our options that describe what timm does anyway.
_HARMLESS = {"drop_path_mode": ("mask",), "init": ("timm",)}


def create_timm_model(config: ModelConfig) -> nn.Module:
    """Create a timm model with the options that it supports; raise `UserError` for others."""
    check_model_name(config.name)
    import timm

    timm_name = config.name.removeprefix(TIMM_PREFIX)
    options = _timm_options(config)
    size = _pair(config.img_size)
    if size is not None and _has_fixed_size(timm_name, size):
        options["img_size"] = size
    options["num_classes"] = 1000 if config.num_classes is None else config.num_classes
    try:
        if size is not None or "in_chans" in options:
            _check_input(timm_name, options, size)
        model = timm.create_model(timm_name, **options)
    except TypeError as error:
        raise _unsupported_option(timm_name, options, error) from error
    return _adapt(model, timm_name, options, img_size=size)


def create_counterpart(variant: Variant) -> nn.Module:
    """Create timm's model for a row of our table: by name, or from timm's class if it has no name."""
    import timm
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    options = counterpart_options(variant)
    if variant.timm_name is not None:
        # The name determines the shape; pass only what a recipe may change.
        passed = {key: options[key] for key in ("img_size", "num_classes", "in_chans")}
        return timm.create_model(variant.timm_name, **passed)
    return (VisionTransformerDistilled if variant.distilled else VisionTransformer)(**options)


def counterpart_options(variant: Variant) -> dict[str, Any]:
    """Return arguments for timm's VisionTransformer (or the distilled one) that give the same model."""
    if variant.attention != "full":
        raise UserError(f"timm's VisionTransformer does not support model.attention = {variant.attention!r}.")
    if variant.pos_embed not in ("learned", "none"):
        raise UserError(f"timm's VisionTransformer does not support model.pos_embed = {variant.pos_embed!r}.")
    same = ("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio")
    options: dict[str, Any] = {name: getattr(variant, name) for name in same}
    options |= {
        "qkv_bias": variant.qkv_bias,
        "qk_norm": variant.qk_norm,
        "proj_bias": variant.bias,
        "init_values": variant.layer_scale,
        "class_token": variant.class_token,
        "reg_tokens": variant.registers,
        "no_embed_class": not variant.embed_prefix,
        "pos_embed": "learn" if variant.pos_embed == "learned" else "none",
        "global_pool": {"cls": "token", "mean": "avg", "max": "max", "tokens": ""}[variant.pool],
        "fc_norm": variant.fc_norm,
        "pos_drop_rate": variant.dropout,
        "proj_drop_rate": variant.dropout,
        "attn_drop_rate": variant.attn_dropout,
    }
    if variant.mlp == "swiglu":
        from timm.layers.mlp import SwiGLUPacked

        # timm counts both halves of the packed matrix.
        packed = 2 * variant.mlp_width / variant.embed_dim
        options |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": packed}
    return options


class TimmModel:
    """Mixin for the class of a timm model: members that the project requires and timm lacks or names differently."""

    timm_name: str
    timm_options: dict[str, Any]
    num_classes: int
    in_chans: int
    img_size: tuple[int, int]
    embed_dim: int
    patch_size: tuple[int, int] | None
    frozen_layers: int
    _layer_ids: dict[str, int]

    def train(self, mode: bool = True) -> Any:
        """Set training mode, except of frozen parts."""
        super().train(mode)  # type: ignore[misc]
        keep_frozen_in_eval(self)
        return self

    @property
    def num_layers(self) -> int:
        """Return the number of layers for layer-wise learning rates, as timm groups them."""
        return max(self._layer_ids.values()) + 1

    def layer_id(self, parameter_name: str) -> int:
        """Return the layer of a parameter; 0 is closest to the image."""
        return self._layer_ids[parameter_name]

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay: timm's list for the model, and all vectors."""
        inherited: set[str] = getattr(super(), "no_weight_decay", set)()
        named = self.named_parameters()  # type: ignore[attr-defined]
        return {name for name, p in named if len(full_shape(p)) <= 1 or name in inherited}

    def set_activation_checkpointing(self, mode: Literal["none", "selective", "full"]) -> None:
        """Recompute activations in the backward pass if timm's model supports it."""
        if mode == "selective":
            raise UserError("parallel.activation_checkpointing = selective: timm models support only none and full.")
        try:
            has_backward_pass = self.frozen_layers < self.num_layers
            self.set_grad_checkpointing(mode == "full" and has_backward_pass)  # type: ignore[attr-defined]
        except (AssertionError, AttributeError) as error:
            if mode == "full":
                raise UserError(
                    "parallel.activation_checkpointing = full: this timm model does not support it."
                ) from error

    def compile_blocks(self, **options: Any) -> None:
        """Compile the complete model in place: timm's families have no common kind of block."""
        self.compile(**options)  # type: ignore[attr-defined]

    def allow_any_size(self) -> None:
        """Accept other image sizes, which most convolutional networks do; raise `UserError` for other models."""
        if getattr(self, "pretrained_cfg", {}).get("fixed_input_size", True):
            raise UserError(f"timm's {self.timm_name} accepts images of one size only.")


def _adapt(model: nn.Module, timm_name: str, options: dict[str, Any], *, img_size: tuple[int, int] | None) -> nn.Module:
    published: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    layer_ids = _layer_ids(model)
    _extend_class(model)
    model.__dict__.update(
        timm_name=timm_name,
        timm_options=options,
        num_classes=options["num_classes"],
        in_chans=options.get("in_chans", 3),
        img_size=img_size or tuple(published.get("input_size", (3, 224, 224))[1:]),
        patch_size=_patch_size(model),
        _layer_ids=layer_ids,
        frozen_layers=0,
    )
    if not hasattr(model, "embed_dim"):
        model.__dict__["embed_dim"] = model.num_features
    return model


def _extend_class(model: nn.Module) -> None:
    """Add the methods of TimmModel to this instance.

    A wrapper would prefix every name in the state dict; a subclass of each of timm's families is not known in advance.
    """
    model.__class__ = type(f"Timm{type(model).__name__}", (TimmModel, type(model)), {})


def _patch_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the patch size in pixels, for models with patches that do not overlap."""
    proj = getattr(getattr(model, "patch_embed", None), "proj", None)
    if isinstance(proj, nn.Conv2d) and proj.kernel_size == proj.stride:
        return proj.kernel_size[0], proj.kernel_size[1]
    return None


def _layer_ids(model: Any) -> dict[str, int]:
    from timm.models import group_parameters

    if not hasattr(model, "group_matcher"):
        return {name: 0 for name, _ in model.named_parameters()}
    return group_parameters(model, model.group_matcher(coarse=False), reverse=True)


def _timm_options(config: ModelConfig) -> dict[str, Any]:
    options: dict[str, Any] = {} if config.in_chans in (None, 3) else {"in_chans": config.in_chans}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _READ_ELSEWHERE or value == field.default or value in _HARMLESS.get(field.name, ()):
            continue
        if field.name not in _PASSED_ON:
            raise UserError(f"model.{field.name} = {value!r}: timm models do not have this option ({config.name}).")
        options[_PASSED_ON[field.name]] = value
    return options


def _has_fixed_size(timm_name: str, size: tuple[int, int]) -> bool:
    """Return whether timm needs the size. Most convolutional networks accept any, and no such argument."""
    from timm.models import get_pretrained_cfg

    published = get_pretrained_cfg(timm_name)
    return published is None or (published.fixed_input_size and tuple(published.input_size[1:]) != size)


def _check_input(timm_name: str, options: dict[str, Any], size: tuple[int, int] | None) -> None:
    """Run the model on one image of the requested size and channels, without allocating memory.

    timm silently ignores some arguments, and then fails in the first training step.
    """
    import timm

    with torch.device("meta"), torch.no_grad():
        model: Any = timm.create_model(timm_name, **options).eval()
        size = size or tuple(model.pretrained_cfg["input_size"][1:])
        channels = options.get("in_chans", 3)
        try:
            model(torch.empty(2, channels, *size))
        except NotImplementedError:
            return  # Not every operation runs without memory.
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UserError(
                f"model.img_size, model.in_chans: timm's {timm_name} does not accept images of {channels} x {size[0]} "
                f"x {size[1]} ({str(error).splitlines()[0] if str(error) else type(error).__name__})."
            ) from error


def _unsupported_option(timm_name: str, options: dict[str, Any], error: TypeError) -> Exception:
    """Return a `UserError` if the model does not know one of the options, otherwise the error itself."""
    ours = {theirs: name for name, theirs in _PASSED_ON.items()}
    for name in options:
        if "unexpected keyword argument" in str(error) and f"'{name}'" in str(error):
            option = ours.get(name, name)
            return UserError(f"model.{option} = {options[name]!r}: timm's {timm_name} does not support this option.")
    return error


def _pair(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None or isinstance(size, tuple):
        return size
    return (size, size)
