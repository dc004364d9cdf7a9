"""Assign parameters and modules to parts of a model by their timm names."""

from __future__ import annotations

import re

from torch import nn

from vit_scale.cost.meta import full_shape
from vit_scale.models.weights.freeze import head_names

PARAM_PARTS = ("patch", "tokens", "position", "attention", "mlp", "norms", "layer_scale", "head", "other")
MAC_PARTS = ("patch", "attention_projections", "attention_matmuls", "mlp", "head", "other")

# The first pattern that matches a parameter's or module's full name is used.
_BY_NAME = (
    ("layer_scale", re.compile(r"(^|\.)(gamma(_\d)?$|ls\d?(\.|$)|layer_scale)")),
    ("position", re.compile(r"pos_embed|rel_pos|relative_position|rope|attention_bias")),
    ("tokens", re.compile(r"(cls|dist|reg|mask)_token")),
    ("patch", re.compile(r"^(patch_embed|conv_stem|stem)(\.|_|\d|$)")),
    ("attention", re.compile(r"attn|attention|token_mixer")),
    ("mlp", re.compile(r"(^|\.)(mlp|ffn)")),
)


def part_of_name(name: str, heads: tuple[str, ...]) -> str:
    """Return one of PARAM_PARTS for the full name of a parameter or module; norms are identified by type instead."""
    if any(name == head or name.startswith(head + ".") for head in heads):
        return "head"
    return next((part for part, pattern in _BY_NAME if pattern.search(name)), "other")


def is_norm(module: nn.Module) -> bool:
    """Return whether `module` is a normalization layer of torch or timm."""
    return "Norm" in type(module).__name__


def params_by_part(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters in each of PARAM_PARTS."""
    heads, modules = head_names(model), dict(model.named_modules())
    counts = dict.fromkeys(PARAM_PARTS, 0)
    for name, parameter in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        part = "norms" if is_norm(owner) else part_of_name(name, heads)
        counts[part] += full_shape(parameter).numel()
    return counts
