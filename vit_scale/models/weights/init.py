"""Weight initialization.

| kind          | linear layers               | patch convolution      | class and register tokens |
| trunc_normal  | truncated normal 0.02       | truncated normal 0.02  | truncated normal 0.02     |
| timm          | truncated normal 0.02       | torch's default        | normal 1e-6               |
| jax           | Xavier uniform, head zero   | LeCun normal           | normal 1e-6               |
| kaiming_patch | truncated normal 0.02       | Kaiming normal, fan in | truncated normal 0.02     |
| whitened      | truncated normal 0.02       | from the training data | truncated normal 0.02     |

Position embeddings, distillation and mask token are truncated normal 0.02 in all of them, biases 0 (1e-6 in jax's MLP).
Deformable attention is initialized as in its paper in all of them: otherwise its heads would start with equal points.
Without data, `whitened` is `trunc_normal`; see whitening.py.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from torch import Tensor, nn
from torch.nn.init import kaiming_normal_, normal_, trunc_normal_, xavier_uniform_, zeros_

from vit_scale.models.deformable_attention import DeformableAttention
from vit_scale.models.linear_attention import LinearAttention
from vit_scale.models.timm_models import TimmModel

Init = Literal["trunc_normal", "timm", "jax", "kaiming_patch", "whitened"]
Editing = Callable[[Tensor], AbstractContextManager[Tensor]]
"""A context in which a parameter is complete and writable; it returns the tensor to write to."""
STD = 0.02


def init_weights(model: nn.Module, kind: Init, editing: Editing = nullcontext) -> None:
    """Initialize a VisionTransformer or a decoder, except norms and LayerScale, whose constructors do.

    `editing`: how to write to a parameter; a strategy that shards parameters gathers each one in it. The random draws
    and their order do not depend on it. timm models have initialized themselves.
    """
    if isinstance(model, TimmModel):
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            _init_linear(module, name, kind, editing)
        elif isinstance(module, nn.Conv2d):
            _init_patch(module, kind, editing)
    for module in model.modules():
        if isinstance(module, DeformableAttention):
            module.init_weights(editing)
    for name, parameter in model.named_parameters():
        if not is_token_or_position(name):
            continue
        with editing(parameter) as tensor:
            if name in ("cls_token", "reg_token") and kind in ("timm", "jax"):
                normal_(tensor, std=1e-6)
            else:
                trunc_normal_(tensor, std=STD)
    # Last, so that the parameters are those of a model with another kind of attention.
    for module in model.modules():
        if isinstance(module, LinearAttention):
            module.draw_features()


def is_token_or_position(parameter_name: str) -> bool:
    """Return whether this is a class, distillation, register or mask token, or a position embedding."""
    root = parameter_name.split(".")[0]
    return root in ("cls_token", "dist_token", "reg_token", "mask_token", "pos_embed") or ".rel_pos." in parameter_name


def _init_linear(layer: nn.Linear, name: str, kind: Init, editing: Editing) -> None:
    _zero_bias(layer, editing)
    with editing(layer.weight) as weight:
        if kind != "jax":
            trunc_normal_(weight, std=STD)
        elif name.startswith("head"):
            zeros_(weight)
        else:
            xavier_uniform_(weight)
    if kind == "jax" and layer.bias is not None and ".mlp." in name:
        with editing(layer.bias) as bias:
            normal_(bias, std=1e-6)


def _init_patch(layer: nn.Conv2d, kind: Init, editing: Editing) -> None:
    if kind == "timm":
        return
    _zero_bias(layer, editing)
    with editing(layer.weight) as weight:
        if kind in ("trunc_normal", "whitened"):
            trunc_normal_(weight, std=STD)
        elif kind == "kaiming_patch":
            kaiming_normal_(weight, nonlinearity="relu")
        else:
            # LeCun: variance 1 / fan in, of a normal cut at two standard deviations (whose own std is 0.8796).
            std = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978
            trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def _zero_bias(layer: nn.Linear | nn.Conv2d, editing: Editing) -> None:
    if layer.bias is not None:
        with editing(layer.bias) as bias:
            zeros_(bias)
