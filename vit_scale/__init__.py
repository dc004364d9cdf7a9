"""Train Vision Transformers, from one CPU to many GPU nodes.

import vit_scale
model = vit_scale.create_model("vit_base_patch16_224", num_classes=10, drop_path=0.2)
run = vit_scale.train("recipes/digits.yaml", {"optim.lr": 2e-3})
run = vit_scale.load_run("runs/digits")  # run.model, run.transform, run.class_names
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_scale.api import train
    from vit_scale.config import Config
    from vit_scale.errors import UserError
    from vit_scale.inference.loaded_run import LoadedRun, load_run
    from vit_scale.models import create_model
    from vit_scale.models.weights.load import load_weights
    from vit_scale.recipe import load_recipe

__version__ = "0.1.0"
__all__ = ["Config", "LoadedRun", "UserError", "create_model", "load_recipe", "load_run", "load_weights", "train"]

# Imported when first asked for, so that `--help` does not wait for torch.
_HOME = {
    "Config": "vit_scale.config",
    "LoadedRun": "vit_scale.inference.loaded_run",
    "UserError": "vit_scale.errors",
    "create_model": "vit_scale.models",
    "load_recipe": "vit_scale.recipe",
    "load_run": "vit_scale.inference.loaded_run",
    "load_weights": "vit_scale.models.weights.load",
    "train": "vit_scale.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vit_scale' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
