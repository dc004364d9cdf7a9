"""From names, recipes and options on a command line to the models that are asked for."""

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
    """One model that is asked for."""

    config: Config
    recipe: str | None = None
    """Path of the recipe; None where the model was asked for by name."""


def load_requests(models: Sequence[str], overrides: Sequence[str]) -> list[Request]:
    """A request for each name of a model or path of a recipe, with `overrides` on top; by default for every variant.

    Raises `UserError` for what is not known.
    """
    return [_load(model, overrides) for model in models or VARIANTS]


def for_each(requests: Sequence[Request], work: Callable[[Request], T], *, skip_unfit: bool) -> list[T]:
    """`work` on each; with `skip_unfit`, models that cannot have the options are left out with a word on stderr."""
    results: list[T] = []
    left_out: dict[str, UserError] = {}
    for request in requests:
        try:
            results.append(work(request))
        except UserError as error:
            if not skip_unfit:
                raise
            left_out[request.config.model.name] = error
    if not results:
        raise next(iter(left_out.values()))
    if left_out:
        name, why = next(iter(left_out.items()))
        print(f"Left out {len(left_out)} models that cannot have these options, such as {name}: {why}", file=sys.stderr)
    return results


def _load(model: str, overrides: Sequence[str]) -> Request:
    is_path = model.endswith((".yaml", ".yml")) or Path(model).is_file()
    if is_path and not model.startswith(TIMM_PREFIX):
        return Request(load_recipe(model, overrides), recipe=model)
    return Request(_config_of_name(model, overrides))


def _config_of_name(name: str, overrides: Sequence[str]) -> Config:
    """A name stands for a recipe that says no more, but for the moving average that most recipes have."""
    tree = {"model": {"name": name}, "schedule": {"epochs": 1}, "ema": {"decay": 0.9999}}
    return build_config(tree, overrides)
