"""The training loop, its state, optimizers and signals.

`vit_scale.train(recipe)` trains a recipe: a package and a function share the name, so this package is callable.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        # By name, like the commands of vit-scale: api.py ranks above this package in the import order.
        return importlib.import_module("vit_scale.api").train(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
