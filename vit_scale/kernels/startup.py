"""Start a training run sooner."""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch

from vit_scale.kernels import enabled

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def without_compiler(optimizer: type[Kind]) -> type[Kind]:
    """Return a subclass of `optimizer` that does not import torch's compiler, which takes 1.5 s at the first step.

    torch imports it to exclude some optimizer methods from compilation. `parallel.compile` compiles the blocks of the
    model, which call no optimizer.
    """
    if not enabled():
        return optimizer
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = inspect.unwrap(getattr(optimizer, name))
        # torch looks here for the function to call, and from the first call on stores the compiler's result here.
        vars(plain).setdefault("__dynamo_disable", plain)
    return type(optimizer.__name__, (optimizer,), {"step": torch.no_grad()(inspect.unwrap(optimizer.step))})
