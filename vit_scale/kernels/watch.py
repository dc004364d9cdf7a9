"""Find out whether anybody observes the modules of a model: by hooks, wrappers or replaced layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from vit_scale.kernels import Shortcut

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_accepted: set[int] = set()
"""Ids of the hooks that strategies installed; torch never uses an id twice in a process."""


def remember_types(model: nn.Module) -> None:
    """Record the type of every submodule, called once when the model is built.

    A layer that LoRA or quantization replaced, or that has a parametrization, then has another type.
    """
    # Not a submodule, parameter or buffer, so that torch's own __setattr__ has nothing to check.
    vars(model)["built_types"] = tuple(type(module) for module in _submodules(model))


def accept_type(model: nn.Module, old: type, new: type) -> None:
    """Accept that a strategy has replaced all layers of type `old` in `model`: they do not prevent shortcuts."""
    for module in model.modules():
        if "built_types" in vars(module):
            vars(module)["built_types"] = tuple(new if kind is old else kind for kind in vars(module)["built_types"])


def find_shortcut(model: nn.Module) -> Shortcut | None:
    """Return a shortcut if only the strategy's hooks, or none at all, observe the submodules of `model`.

    The model itself may have hooks: they see images and logits, which are the same either way. Nothing is cached,
    so a hook added later is seen in the next forward pass; this takes about 0.3 us per submodule.
    """
    # torch.compile of the whole model traces the plain code. `compile_blocks` makes the choice outside its graphs.
    if torch.compiler.is_dynamo_compiling() or _has_any_global_hook():
        return None
    built: tuple[type, ...] = vars(model).get("built_types", ())
    modules = _submodules(model)
    if tuple(map(type, modules)) != built:
        return None
    hooked = False
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            if not _accepted.issuperset(_hook_ids(module)):
                return None
            hooked = True
        if "forward" in module.__dict__:
            return None
    if hooked and _has_compiled_submodule(model):
        return None
    return Shortcut(hooked=hooked)


@contextmanager
def accept_hooks(model: nn.Module) -> Iterator[None]:
    """Accept the hooks that are installed on submodules of `model` inside this context."""
    before = {id for module in _submodules(model) for id in _hook_ids(module)}
    yield
    _accepted.update({id for module in _submodules(model) for id in _hook_ids(module)} - before)


def call(module: nn.Module, forward: Any, *inputs: Any, hooked: bool) -> Any:
    """Compute `forward(module, *inputs)`; if `hooked`, as a call of the module, whose hooks run around it.

    ZeRO-3 gathers the weights of a layer in such a hook.
    """
    if not hooked:
        return forward(module, *inputs)
    # nn.Module.__call__ looks up `self.forward`, so an attribute of the instance takes precedence.
    vars(module)["forward"] = lambda *inputs: forward(module, *inputs)
    try:
        return module(*inputs)
    finally:
        del vars(module)["forward"]


def _submodules(model: nn.Module) -> list[nn.Module]:
    """Return every submodule in a fixed order; several times as fast as `model.modules()`."""
    found = [model]
    for module in found:  # The list grows while it is read.
        if module._modules:
            found += [child for child in module._modules.values() if child is not None]
    return found[1:]


def _hook_ids(module: nn.Module) -> Iterator[int]:
    return (id for kind in _HOOKS for id in vars(module)[kind])


def _has_compiled_submodule(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in _submodules(model))
