"""Parameter groups (weight decay, layer-wise learning rate) and the optimizer built from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vit_scale.config import OptimConfig
from vit_scale.errors import UserError, did_you_mean
from vit_scale.kernels.startup import without_compiler
from vit_scale.models.composite import BACKBONE
from vit_scale.models.interface import full_shape
from vit_scale.train.optim.muon import Muon

# Elementwise optimizers. ZeRO passes pieces of flattened layers, which makes no difference to them; an optimizer that
# uses whole layers, such as LAMB or Muon, would take different steps than under DDP.
ELEMENTWISE = {"adam", "adamw", "nadam", "nadamw", "radam", "radamw", "adamax", "lion", "sgd", "momentum", "rmsprop"}


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Return groups of equal weight decay and learning-rate scale, in a stable order.

    Vectors (biases, norms, LayerScale) and the parameters in `model.no_weight_decay()` (tokens, position embeddings)
    are not decayed. `lr_scale` is layer_decay to the power of the number of layers above. With Muon, the matrices of
    blocks are in separate groups, and all other groups are scaled by optim.adamw_lr / optim.lr.
    """
    undecayed: set[str] = model.no_weight_decay()  # type: ignore[operator]
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        decay = 0.0 if len(full_shape(p)) <= 1 or name in undecayed else config.weight_decay
        scale = _lr_scale(model, name, config.layer_decay)
        matrix = config.name == "muon" and len(full_shape(p)) == 2 and _is_in_block(name)
        if config.name == "muon" and not matrix and config.adamw_lr is not None:
            scale *= config.adamw_lr / config.lr
        new = {"params": [], "weight_decay": decay, "lr_scale": scale} | ({"matrices": True} if matrix else {})
        groups.setdefault((decay, scale, matrix), new)["params"].append(p)
    if not groups:
        raise UserError("model.freeze = all: nothing is left to train, because the model has no head")
    return list(groups.values())


def _is_in_block(name: str) -> bool:
    """Return whether a parameter is in a transformer block of a model, of a composite's backbone or of its decoder."""
    return name.removeprefix(BACKBONE).removeprefix("decoder.").startswith("blocks.")


def _lr_scale(model: nn.Module, name: str, layer_decay: float) -> float:
    if layer_decay == 1.0:
        return 1.0
    return layer_decay ** (model.num_layers - 1 - model.layer_id(name))  # type: ignore[operator]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW (fused), SGD, Muon, or any timm optimizer by name."""
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
    """Raise `UserError` for an unknown name, or an optimizer that would take different steps with `strategy`."""
    _check_name(name)
    if strategy.startswith("zero") and name not in ELEMENTWISE:
        raise UserError(
            f"optim.name = {name!r}: needs whole layers, which parallel.strategy = {strategy!r} shards.\n"
            f"Use parallel.strategy=ddp, or one of {', '.join(sorted(ELEMENTWISE))}."
        )


def _check_name(name: str) -> None:
    if name in ("adamw", "sgd", "muon"):
        return
    from timm.optim import list_optimizers

    known = [*map(str, list_optimizers()), "adamw", "sgd"]
    if name not in known:
        hint = did_you_mean(name, known, n=3) or "use adamw, lamb, sgd, muon or any optimizer in timm.optim"
        raise UserError(f"optim.name = {name!r}: unknown optimizer; {hint}")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each group to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
