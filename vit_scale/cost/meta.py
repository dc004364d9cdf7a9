"""Models on the meta device: all shapes, no memory, no arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# Of tensors and, under the same names, of torch.nn.init.
_FILLS = {"copy_", "normal_", "uniform_", "fill_", "zero_", "erfinv_", "mul_", "add_", "clamp_", "constant_"}
_FILLS |= {"kaiming_uniform_"}


class _SkipInit(TorchFunctionMode):
    """Filling a meta tensor changes nothing, yet takes most of the time of building a model there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FILLS:
            target = args[0] if args else kwargs["tensor"]
            if target.is_meta:
                return target
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Tensors made within live on the meta device, and initialising them is skipped."""
    with torch.device("meta"), _SkipInit():
        yield


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` makes, on the meta device and in evaluation mode."""
    with on_meta():
        model = build()
    return model.to("meta").eval()


def twin(model: nn.Module, device: str = "meta") -> nn.Module:
    """A copy of a model with the same shapes and none of its values or hooks; the model itself is only read.

    Wrappers of torch.compile and DDP are looked through; partitioned parameters (ZeRO-3) get their whole shape.
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
    """The model inside the wrappers of torch.compile, DDP and DeepSpeed."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    empty = torch.empty(whole_shape(tensor), dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of a tensor, also where ZeRO-3 has left only a part of it on this process."""
    return cast(torch.Size, getattr(tensor, "ds_shape", tensor.shape))
