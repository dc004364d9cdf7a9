"""A model by name, or a file of weights with the name of its model: what can be evaluated without a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vit_scale.checkpoints.run_weights import Kind
from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import LoadedRun, build_loaded, is_run, load_run
from vit_scale.models.variants import TIMM_PREFIX, check_model_name
from vit_scale.models.weights.read import read_weights
from vit_scale.recipe import build_config


def load_target(
    target: str, *, model: str | None = None, weights: Kind | None = None, overrides: Sequence[str] = ()
) -> LoadedRun:
    """What a command line names: a run, a checkpoint, `timm/NAME` with its published weights, or a file for `model`."""
    path = Path(target)
    if path.is_file() and not is_run(path.parent):
        if model is None:
            raise UserError(
                f"{target}: a file of weights does not tell its model; add --model NAME, such as timm/resnet18"
            )
        return load_named(model, target, overrides)
    if not path.exists() and target.startswith(TIMM_PREFIX):
        return load_named(target, target, overrides)
    if model is not None:
        raise UserError(f"--model {model}: goes with a file of weights; the run {target} knows its model")
    return load_run(path, weights=weights, overrides=overrides)


def load_named(name: str, weights: str, overrides: Sequence[str] = ()) -> LoadedRun:
    """The model `name` with weights of a file or of timm's hub, seeing images as timm's own evaluation shows them."""
    check_model_name(name)
    tree: dict[str, Any] = {"model": {"name": name}, "schedule": {"steps": 1}}
    names: tuple[str, ...] = ()
    if name.startswith(TIMM_PREFIX):
        timm_name = name.removeprefix(TIMM_PREFIX)
        tree |= _as_timm_evaluates(timm_name)
        names = _imagenet_names(timm_name)
    config = build_config(tree, overrides)
    state = read_weights(weights)
    loaded = build_loaded(config, state, source=weights, names=())
    known = names if len(names) == loaded.model.num_classes else ()
    return replace(loaded, class_names=known, weights=f"weights of {weights}")


def _as_timm_evaluates(timm_name: str) -> dict[str, Any]:
    """Size, crop and filter of timm's `validate.py` for this model: those of testing, where they differ."""
    from timm.data import resolve_data_config
    from timm.models import get_pretrained_cfg

    published = get_pretrained_cfg(timm_name)
    seen = resolve_data_config({}, pretrained_cfg=published.to_dict() if published else {}, use_test_size=True)
    if seen["crop_mode"] != "center":
        raise UserError(
            f"{timm_name}: timm evaluates it with the crop {seen['crop_mode']!r}; only `center` is known here"
        )
    size = list(seen["input_size"][1:])
    known = seen["interpolation"] in ("bicubic", "bilinear")
    filter_name = seen["interpolation"] if known else "bicubic"
    return {"model": {"name": TIMM_PREFIX + timm_name, "img_size": size}} | {
        "augment": {"eval_crop": seen["crop_pct"], "eval_interpolation": filter_name}
    }


def _imagenet_names(timm_name: str) -> tuple[str, ...]:
    """Synsets of the ImageNet that the published weights were trained on, if it was one."""
    from timm.data import ImageNetInfo, infer_imagenet_subset
    from timm.models import get_pretrained_cfg

    published = get_pretrained_cfg(timm_name)
    subset = infer_imagenet_subset(published.to_dict()) if published else None
    return tuple(ImageNetInfo(subset).label_names()) if subset else ()
