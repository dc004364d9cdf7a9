"""Code that exists only for speed: `VIT_SCALE_KERNELS=0` switches all of it off.

`choose` decides once per forward pass whether a model may take shortcuts. They compute the same numbers as the plain
code in `models/`, but overwrite intermediate results and skip tokens that the head does not read, so they apply only
if nobody observes the modules (see watch.py). Functions that overwrite an argument end in `_`.

This file must not import torch: malloc.py is used before torch is loaded.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, NamedTuple


class Shortcut(NamedTuple):
    """How fast_block.py computes a block; plain values, which compiled and checkpointed blocks treat as constants."""

    tokens: int | None = None
    """Return only this many leading tokens; None: all."""
    hooked: bool = False
    """The strategy installed hooks: call each layer as a module, so that they run."""


def enabled() -> bool:
    """Return whether code that exists only for speed may be used."""
    return os.environ.get("VIT_SCALE_KERNELS", "1") != "0"


def choose(model: Any) -> Shortcut | None:
    """Return the shortcut for the blocks of `model` in this forward pass, or None for the plain code.

    `model.kernel = explicit` is always the plain code, which can be differentiated twice.
    """
    from vit_scale.kernels import watch

    return watch.find_shortcut(model) if enabled() and model.kernel != "explicit" else None


def accept_hooks(model: Any) -> AbstractContextManager[None]:
    """Accept the hooks that a strategy installs on `model` inside this context: they do not prevent shortcuts."""
    from vit_scale.kernels import watch

    return watch.accept_hooks(model)
