"""Models on the meta device: shapes without memory or arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# Methods of tensors and, under the same names, functions of torch.nn.init.
_FILLS = {"copy_", "normal_", "uniform_", "fill_", "zero_", "erfinv_", "mul_", "add_", "clamp_", "constant_"}
_FILLS |= {"kaiming_uniform_"}


class _SkipInit(TorchFunctionMode):
    """Skip the initialization of meta tensors: it has no effect, yet takes most of the time to build a model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FILLS:
            target = args[0] if args else kwargs["tensor"]
            if target.is_meta:
                return target
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Create tensors on the meta device and skip their initialization within this context."""
    with torch.device("meta"), _SkipInit():
        yield


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device, in evaluation mode."""
    with on_meta():
        model = build()
    return model.to("meta").eval()


def twin(model: nn.Module, device: str = "meta") -> nn.Module:
    """Copy a model's structure and shapes without values and hooks; the model itself is not modified.

    torch.compile and DDP wrappers are removed; partitioned parameters (ZeRO-3) get their full shape.
    """
    model = unwrap(model)
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(t): _empty_like(t, device) for t in tensors})
    for module in copied.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module._backward_hooks.clear()
    return copied.eval()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DDP and DeepSpeed wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    empty = torch.empty(full_shape(tensor), dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """Return the full shape of a tensor, even if ZeRO-3 has partitioned it."""
    return cast(torch.Size, getattr(tensor, "ds_shape", tensor.shape))
