"""Parameter groups (weight decay, layer-wise learning rate) and the optimiser built on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vit_scale.config import OptimConfig
from vit_scale.errors import UserError, did_you_mean
from vit_scale.kernels.startup import without_compiler
from vit_scale.models.interface import full_shape
from vit_scale.train.optim.muon import Muon

# Optimisers that treat each number on its own. ZeRO hands them pieces of flattened layers, which makes no difference
# to these; one that looks at whole layers, such as LAMB or Muon, would take other steps than under DDP.
ELEMENTWISE = {"adam", "adamw", "nadam", "nadamw", "radam", "radamw", "adamax", "lion", "sgd", "momentum", "rmsprop"}


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups of equal weight decay and learning-rate scale, in a stable order.

    Vectors (biases, norms, LayerScale) and what the model names in `no_weight_decay()` (tokens, position embeddings)
    are not decayed. `lr_scale` is layer_decay to the number of layers above. For Muon the matrices of blocks are apart,
    and all else has the share of the learning rate that optim.adamw_lr is of it.
    """
    undecayed: set[str] = model.no_weight_decay()  # type: ignore[operator]
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        decay = 0.0 if len(full_shape(p)) <= 1 or name in undecayed else config.weight_decay
        scale = _lr_scale(model, name, config.layer_decay)
        matrix = config.name == "muon" and len(full_shape(p)) == 2 and name.startswith("blocks.")
        if config.name == "muon" and not matrix and config.adamw_lr is not None:
            scale *= config.adamw_lr / config.lr
        new = {"params": [], "weight_decay": decay, "lr_scale": scale} | ({"matrices": True} if matrix else {})
        groups.setdefault((decay, scale, matrix), new)["params"].append(p)
    return list(groups.values())


def _lr_scale(model: nn.Module, name: str, layer_decay: float) -> float:
    if layer_decay == 1.0:
        return 1.0
    return layer_decay ** (model.num_layers - 1 - model.layer_id(name))  # type: ignore[operator]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (fused), SGD, Muon, or any optimiser of timm by its name there."""
    groups = parameter_groups(model, config)
    if config.name == "adamw":
        return without_compiler(torch.optim.AdamW)(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    if config.name == "sgd":
        return without_compiler(torch.optim.SGD)(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0
        )
    if config.name == "muon":
        return Muon(groups, lr=config.lr, momentum=config.momentum, betas=config.betas, eps=config.eps)
    return _timm_optimizer(groups, config)


def _timm_optimizer(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2, get_optimizer_info

    _check_name(config.name)
    info = get_optimizer_info(config.name)
    options: dict[str, Any] = {}
    if info.has_eps:
        options["eps"] = config.eps
    if info.has_betas and info.num_betas == 2:
        options["betas"] = config.betas
    if info.has_momentum:
        options["momentum"] = config.momentum
    try:
        return create_optimizer_v2(groups, opt=config.name, lr=config.lr, weight_decay=config.weight_decay, **options)
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"optim.name = {config.name!r}: cannot be used here: {error}") from None


def check_optimizer(name: str, strategy: str) -> None:
    """Raise `UserError` for a name that nobody knows, or one that `strategy` would change the meaning of."""
    _check_name(name)
    if strategy.startswith("zero") and name not in ELEMENTWISE:
        raise UserError(
            f"optim.name = {name!r}: looks at whole layers, which parallel.strategy = {strategy!r} cuts into pieces.\n"
            f"Use parallel.strategy=ddp, or one of {', '.join(sorted(ELEMENTWISE))}."
        )


def _check_name(name: str) -> None:
    if name in ("adamw", "sgd", "muon"):
        return
    from timm.optim import list_optimizers

    known = [*map(str, list_optimizers()), "adamw", "sgd"]
    if name not in known:
        hint = did_you_mean(name, known, n=3) or "adamw, lamb, sgd, or a name of timm.optim"
        raise UserError(f"optim.name = {name!r}: there is no such optimiser; {hint}")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group its share of `lr`. A rate that is a tensor (capturable optimisers) is filled in place."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
