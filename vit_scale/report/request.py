"""Resolve names, recipes and options on the command line to the requested models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vit_scale.config import Config
from vit_scale.errors import UserError
from vit_scale.models.variants import TIMM_PREFIX, VARIANTS
from vit_scale.recipe import build_config, load_recipe

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One requested model."""

    config: Config
    recipe: str | None = None
    """Recipe path; None if the model was requested by name."""


def load_requests(models: Sequence[str], overrides: Sequence[str]) -> list[Request]:
    """Return one request per model name or recipe path, with `overrides` applied; by default one per variant.

    Raises `UserError` for unknown names.
    """
    return [_load(model, overrides) for model in models or VARIANTS]


def for_each(requests: Sequence[Request], work: Callable[[Request], T], *, skip_incompatible: bool) -> list[T]:
    """Call `work` on each request; `skip_incompatible`: skip models incompatible with the options, with a warning."""
    results: list[T] = []
    skipped: dict[str, UserError] = {}
    for request in requests:
        try:
            results.append(work(request))
        except UserError as error:
            if not skip_incompatible:
                raise
            skipped[request.config.model.name] = error
    if not results:
        raise next(iter(skipped.values()))
    if skipped:
        name, reason = next(iter(skipped.items()))
        print(f"Skipped {len(skipped)} models incompatible with these options, e.g. {name}: {reason}", file=sys.stderr)
    return results


def _load(model: str, overrides: Sequence[str]) -> Request:
    is_path = model.endswith((".yaml", ".yml")) or Path(model).is_file()
    if is_path and not model.startswith(TIMM_PREFIX):
        return Request(load_recipe(model, overrides), recipe=model)
    return Request(_config_of_name(model, overrides))


def _config_of_name(name: str, overrides: Sequence[str]) -> Config:
    """Build the config of a recipe with only this model name, and an EMA, which most recipes have."""
    tree = {"model": {"name": name}, "schedule": {"epochs": 1}, "ema": {"decay": 0.9999}}
    return build_config(tree, overrides)
