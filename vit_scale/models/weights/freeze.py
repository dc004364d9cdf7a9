"""Which weights are trained: `model.freeze`.

`frozen_layers` of a model is the number of leading layers, by `layer_id`, that are not trained. Nothing before them
needs a gradient, so autograd saves nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from vit_scale.errors import UserError

Freeze = Literal["none", "all"] | int


def freeze(model: Any, setting: Freeze) -> None:
    """Freeze a new model, an `ImageModel`, by `model.freeze`; raise `UserError` if it has too few layers."""
    if setting == "none":
        return
    model.frozen_layers = _frozen_layers(model, setting)
    heads = tuple(f"{name}." for name in head_names(model))
    for name, parameter in model.named_parameters():
        if model.layer_id(name) < model.frozen_layers and not (setting == "all" and name.startswith(heads)):
            parameter.requires_grad_(False)
    model.train(model.training)


def _frozen_layers(model: Any, setting: Freeze) -> int:
    layers: int = model.num_layers
    if setting == "all":
        return layers
    if layers < 2:
        raise UserError(f"model.freeze = {setting}: timm has no layers of this model; use none or all")
    deepest = layers - 2  # the first layer is the embedding, the last one the head
    if int(setting) > deepest:
        raise UserError(f"model.freeze = {setting}: the model has {deepest} blocks; use 0 to {deepest}, all or none")
    return int(setting) + 1


def keep_frozen_in_eval(model: Any) -> None:
    """Set all frozen parts to evaluation mode; called by the `train` method of a model."""
    for module in frozen_modules(model) if model.frozen_layers else ():
        module.eval()


def frozen_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the submodules of a model with frozen layers that have no trained parameter."""
    for name, module in list(model.named_modules())[1:]:
        parameters = list(module.parameters())
        # The dropout of the embedding is frozen with it.
        if name == "pos_drop" or (parameters and not any(parameter.requires_grad for parameter in parameters)):
            yield module


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Return the full names of the classifier modules, from `get_classifier()` of timm models."""
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None  # type: ignore[operator]
    heads = classifier if isinstance(classifier, (tuple, list)) else (classifier,)
    found = tuple(name for name, module in model.named_modules() if name and any(module is head for head in heads))
    return found or ("head", "head_dist")


def untrained_backbone_warning(setting: Freeze, weights: str | None) -> str | None:
    """Return a warning if frozen layers keep their random initialization."""
    if setting == "none" or weights is not None:
        return None
    return f"model.freeze = {setting} without model.weights: the frozen layers keep their random initialization."
