"""Trace the operations and shapes of any model through one forward pass of one image on the meta device.

The formulas are from torch.utils.flop_counter, exact for matmuls, convolutions and attention. FlopCounterMode itself
takes twice as long (it decomposes and attributes every operation) and does not count LayerNorm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vit_scale.cost.parts import MAC_PARTS, part_of_name
from vit_scale.models.linear_attention import LinearAttention
from vit_scale.models.weights.freeze import head_names

Shape = tuple[int, ...]
Running = tuple[str, bool]
"""The part of a running module, and whether it is frozen."""


@dataclass
class Trace:
    """Operations and shapes of one forward pass of one image."""

    macs: Counter[str] = field(default_factory=Counter)
    """Multiply-accumulates by part (MAC_PARTS)."""
    frozen_macs: int = 0
    """Multiply-accumulates of modules with parameters of which none is trained."""
    norm_elements: int = 0
    """LayerNorm elements."""
    stages: dict[str, list[Shape]] = field(default_factory=dict)
    """Output shapes, without the batch dimension, of every stage with parameters."""


def trace(model: nn.Module, img_size: tuple[int, int], in_chans: int) -> Trace:
    """Trace `model`, which must be on the meta device, on one image."""
    result, stack = Trace(), [("other", False)]
    image = torch.empty(1, in_chans, *img_size, device="meta")
    with torch.no_grad(), _hooks(model, result, stack), _Operations(result, stack):
        model(image)
    return result


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count every operation, and compute the output shapes of identical operations only once.

    On the meta device the result depends only on the shapes of the arguments, and torch is slow to compute it. The
    blocks of a transformer are identical, so all except the first are served from a cache.
    """

    def __init__(self, result: Trace, stack: list[Running]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._result, self._stack = result, stack
        self._cache: dict[Any, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket
        if operation is torch.ops.aten.native_layer_norm:
            self._result.norm_elements += math.prod(args[0].shape)
        if any(value.alias_info for value in (*func._schema.arguments, *func._schema.returns)):
            return func(*args, **kwargs)  # a view or in-place operation: fast, and the result aliases an argument
        key = (func, *(_metadata(leaf) for leaf in tree_leaves((args, kwargs))))
        if key not in self._cache:
            out = func(*args, **kwargs)
            flops = flop_registry.get(operation)
            self._cache[key] = out, flops(*args, **kwargs, out_val=out) // 2 if flops else 0
        out, macs = self._cache[key]
        if macs:
            self._result.macs[self._part(operation.__name__)] += macs
            self._result.frozen_macs += macs if self._stack[-1][1] else 0
        return out

    def _part(self, operation: str) -> str:
        if operation in ("bmm", "baddbmm") or "scaled_dot_product" in operation:
            return "attention_matmuls"
        part = self._stack[-1][0]
        part = "attention_projections" if part == "attention" else part
        return part if part in MAC_PARTS else "other"


def _metadata(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def _hooks(model: nn.Module, result: Trace, stack: list[Running]) -> Iterator[None]:
    """Keep the running module on top of `stack`, and record the output shapes of stages."""
    heads, stages = head_names(model), set(stage_names(model))
    handles = []
    for name, module in model.named_modules():
        running = (_part_of(name, module, heads), _is_frozen(module))
        handles.append(module.register_forward_pre_hook(_push(stack, running)))
        handles.append(module.register_forward_hook(_pop(stack)))
        if name in stages:
            handles.append(module.register_forward_hook(_record_shapes(result, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _part_of(name: str, module: nn.Module, heads: tuple[str, ...]) -> str:
    # Outside of its projections it multiplies with random features, which by its shapes looks like a linear layer.
    if isinstance(module, LinearAttention):
        return "attention_matmuls"
    return part_of_name(name, heads) if name else "other"


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _push(stack: list[Running], running: Running) -> Callable[..., None]:
    def push(*_: object) -> None:
        stack.append(running)

    return push


def _pop(stack: list[Running]) -> Callable[..., None]:
    def pop(*_: object) -> None:
        stack.pop()

    return pop


def _record_shapes(result: Trace, name: str) -> Callable[..., None]:
    def record(_module: nn.Module, _inputs: object, out: Any) -> None:
        result.stages[name] = shapes_of(out)

    return record


def shapes_of(out: Any) -> list[Shape]:
    """Return the shapes, without the batch dimension, of all tensors in a module's output."""
    tensors = (out,) if isinstance(out, torch.Tensor) else out.values() if isinstance(out, dict) else out
    return [tuple(t.shape[1:]) for t in tensors if isinstance(t, torch.Tensor)]


def stage_names(model: nn.Module) -> list[str]:
    """Return the names of children with parameters; for lists such as `blocks`, the names of their entries."""
    names = []
    for name, child in model.named_children():
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential))
        entries = [(f"{name}.{i}", entry) for i, entry in child.named_children()] if is_list else [(name, child)]
        names += [full for full, entry in entries if next(entry.parameters(), None) is not None]
    return names
