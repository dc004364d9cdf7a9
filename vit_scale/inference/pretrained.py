"""Load a timm model with its published weights, or a weights file with the name of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vit_scale.checkpoints.run_weights import Kind
from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import (
    LoadedRun,
    build_encoder,
    build_loaded,
    is_run,
    leading_size,
    load_encoder,
    load_run,
)
from vit_scale.models.variants import TIMM_PREFIX, check_model_name
from vit_scale.models.weights.read import ADDED, read_weights
from vit_scale.recipe import build_config


def load_target(
    target: str,
    *,
    model: str | None = None,
    weights: Kind | None = None,
    overrides: Sequence[str] = (),
    encoder: bool = False,
) -> LoadedRun:
    """Load what a command line names: a run, a checkpoint, `timm/NAME`, or a weights file for `model`.

    `encoder`: load only the image model, of a run of any task, with or without a classifier.
    """
    path = Path(target)
    if path.is_file() and not is_run(path.parent):
        if model is None:
            raise UserError(
                f"{target}: a weights file alone does not define its model; add --model NAME, e.g. timm/resnet18"
            )
        return load_pretrained(model, target, overrides, encoder=encoder)
    if not path.exists() and target.startswith(TIMM_PREFIX):
        return load_pretrained(target, target, overrides, encoder=encoder)
    if model is not None:
        raise UserError(f"--model {model}: only valid with a weights file; the run {target} defines its model")
    load = load_encoder if encoder else load_run
    return load(path, weights=weights, overrides=overrides)


def load_pretrained(name: str, weights: str, overrides: Sequence[str] = (), *, encoder: bool = False) -> LoadedRun:
    """Load the model `name` with weights of a file or of the Hub, and with the image transform of timm's evaluation.

    `encoder`: weights without a classifier are a model without one, not an error.
    """
    check_model_name(name)
    tree: dict[str, Any] = {"model": {"name": name}, "schedule": {"steps": 1}}
    names: tuple[str, ...] = ()
    if name.startswith(TIMM_PREFIX):
        timm_name = name.removeprefix(TIMM_PREFIX)
        tree |= _timm_eval_options(timm_name)
        names = _imagenet_names(timm_name)
    config = build_config(tree, overrides)
    state = read_weights(weights)
    classes = config.model.num_classes or leading_size(state, name, "classifier", 0)
    if not classes and encoder:
        state = {key: tensor for key, tensor in state.items() if not key.startswith(ADDED)}
        config = replace(config, model=replace(config.model, num_classes=0))
    elif not classes:
        raise UserError(f"{weights}: apparently not the weights of {name}: they have no classifier")
    build = build_encoder if encoder else build_loaded
    loaded = build(config, state, source=weights, names=names if len(names) == classes else ())
    return replace(loaded, weights=f"weights of {weights}")


def _timm_eval_options(timm_name: str) -> dict[str, Any]:
    """Return image size, crop and interpolation of timm's `validate.py` for this model: its test values, if any."""
    from timm.data import resolve_data_config
    from timm.models import get_pretrained_cfg

    published = get_pretrained_cfg(timm_name)
    seen = resolve_data_config({}, pretrained_cfg=published.to_dict() if published else {}, use_test_size=True)
    if seen["crop_mode"] != "center":
        raise UserError(
            f"{timm_name}: timm evaluates it with crop mode {seen['crop_mode']!r}; only `center` is supported"
        )
    size = list(seen["input_size"][1:])
    known = seen["interpolation"] in ("bicubic", "bilinear")
    filter_name = seen["interpolation"] if known else "bicubic"
    return {"model": {"name": TIMM_PREFIX + timm_name, "img_size": size}} | {
        "augment": {"eval_crop": seen["crop_pct"], "eval_interpolation": filter_name}
    }


def _imagenet_names(timm_name: str) -> tuple[str, ...]:
    """Return the synsets of the ImageNet variant that the published weights were trained on, if any."""
    from timm.data import ImageNetInfo, infer_imagenet_subset
    from timm.models import get_pretrained_cfg

    published = get_pretrained_cfg(timm_name)
    subset = infer_imagenet_subset(published.to_dict()) if published else None
    return tuple(ImageNetInfo(subset).label_names()) if subset else ()
