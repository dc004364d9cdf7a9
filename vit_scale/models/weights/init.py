"""How weights start.

| kind          | linear layers               | patch convolution      | class and register tokens |
| trunc_normal  | truncated normal 0.02       | truncated normal 0.02  | truncated normal 0.02     |
| timm          | truncated normal 0.02       | torch's default        | normal 1e-6               |
| jax           | Xavier uniform, head zero   | LeCun normal           | normal 1e-6               |
| kaiming_patch | truncated normal 0.02       | Kaiming normal, fan in | truncated normal 0.02     |
| whitened      | truncated normal 0.02       | from the training data | truncated normal 0.02     |

Position embeddings and the distillation token are truncated normal 0.02 in all, biases 0 (1e-6 in jax's MLP).
Where there are no data, `whitened` is `trunc_normal`; see whitening.py.
"""

import math
from typing import Literal

from torch import nn
from torch.nn.init import kaiming_normal_, normal_, trunc_normal_, xavier_uniform_, zeros_

Init = Literal["trunc_normal", "timm", "jax", "kaiming_patch", "whitened"]
STD = 0.02


def init_weights(model: nn.Module, kind: Init) -> None:
    """Initialise every parameter of a VisionTransformer but norms and LayerScale, which made themselves."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            _init_linear(module, name, kind)
        elif isinstance(module, nn.Conv2d):
            _init_patch(module, kind)
    for name, parameter in model.named_parameters():
        if name in ("cls_token", "reg_token") and kind in ("timm", "jax"):
            normal_(parameter, std=1e-6)
        elif is_token_or_position(name):
            trunc_normal_(parameter, std=STD)


def is_token_or_position(parameter_name: str) -> bool:
    """Class, distillation and register tokens, and everything that tells positions."""
    root = parameter_name.split(".")[0]
    return root in ("cls_token", "dist_token", "reg_token", "pos_embed") or ".rel_pos." in parameter_name


def _init_linear(layer: nn.Linear, name: str, kind: Init) -> None:
    if layer.bias is not None:
        zeros_(layer.bias)
    if kind != "jax":
        trunc_normal_(layer.weight, std=STD)
    elif name.startswith("head"):
        zeros_(layer.weight)
    else:
        xavier_uniform_(layer.weight)
        if layer.bias is not None and ".mlp." in name:
            normal_(layer.bias, std=1e-6)


def _init_patch(layer: nn.Conv2d, kind: Init) -> None:
    if kind == "timm":
        return
    if layer.bias is not None:
        zeros_(layer.bias)
    if kind in ("trunc_normal", "whitened"):
        trunc_normal_(layer.weight, std=STD)
    elif kind == "kaiming_patch":
        kaiming_normal_(layer.weight, nonlinearity="relu")
    else:
        # LeCun: variance 1 / fan in, of a normal cut at two standard deviations (whose own deviation is 0.8796).
        std = math.sqrt(1 / layer.weight[0].numel()) / 0.87962566103423978
        trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
