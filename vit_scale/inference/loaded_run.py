"""From the folder of a run to something that can be used: model, transform, class names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from vit_scale.checkpoints.run_weights import Kind, RunWeights, StateDict, find_run_weights
from vit_scale.config import Config, with_current_names
from vit_scale.data.normalize import resolve_normalization
from vit_scale.errors import UserError
from vit_scale.inference.image_transform import ImageTransform
from vit_scale.models import create_from_config
from vit_scale.models.interface import ImageModel
from vit_scale.models.variants import TIMM_PREFIX
from vit_scale.models.weights.load import fit_weights, grid_of
from vit_scale.recipe import build_config, load_recipe


@dataclass(frozen=True)
class LoadedRun:
    """A trained model and what goes with it."""

    model: ImageModel
    """In evaluation mode, on the CPU."""
    transform: ImageTransform
    """A path, Pillow image or array to the model's input, without the batch dimension."""
    class_names: tuple[str, ...]
    """What the model's outputs mean; empty where nobody knows."""
    config: Config
    """The options of the run."""
    weights: str
    """Which weights these are, in words."""
    averaged: bool = False
    """Whether they are the average (EMA)."""
    folder: Path | None = None
    """The run's folder."""
    record: dict[str, Any] = field(default_factory=dict)
    """summary.json of the run, or meta.json of the checkpoint: results, versions, commit."""

    def name_of(self, index: int) -> str:
        """The name of a class, or its number."""
        return self.class_names[index] if self.class_names else str(index)


def load_run(path: str | Path, *, weights: Kind | None = None, overrides: Sequence[str] = ()) -> LoadedRun:
    """The model of a run, ready to use; also of one that is still going on.

        run = vit_scale.load_run("runs/digits")
        logits = run.model(run.transform("seven.png")[None])
        print(run.class_names[logits.argmax()])

    `path`: the folder of a run (its final weights, else those of its newest whole checkpoint), of one of its
    checkpoints, or a file of weights in either. `weights`: `ema` or `raw`; None: the average where the run has one.
    `overrides`: options to change, as on the command line (`model.img_size=384` resamples the positions).
    Raises `UserError` where there is no such run or it has no weights yet.
    """
    folder, found = _find(Path(path), weights)
    record, trained_with = _read_record(folder), _read_config(folder, ())
    config = _read_config(folder, overrides) if overrides else trained_with
    names = tuple(record.get("class_names") or ())
    loaded = build_loaded(config, found.read(), source=str(found), names=names, trained_with=trained_with)
    run_folder = folder.parent.parent if (folder / "meta.json").is_file() else folder
    return replace(loaded, weights=str(found), averaged=found.kind == "ema", folder=run_folder, record=record)


def build_loaded(
    config: Config, state: StateDict, *, source: str, names: tuple[str, ...], trained_with: Config | None = None
) -> LoadedRun:
    """The model of `config` with these weights, all of which must be used, and its transform."""
    classes = config.model.num_classes or len(names) or leading_size(state, config.model.name, "classifier", 0)
    channels = config.model.in_chans or leading_size(state, config.model.name, "first_conv", 1)
    if not classes:
        raise UserError(
            f"{source}: not the weights of {config.model.name}, as far as can be told: its classifier is not among them"
        )
    # The kernel that a run was trained with need not be there where it is used.
    options = replace(config.model, kernel="auto")
    model = cast(ImageModel, create_from_config(options, num_classes=classes, in_chans=channels or 3))
    report = fit_weights(model, state, source=source, grid=grid_of((trained_with or config).model))
    if report.initialized or report.skipped:
        name, why = next(iter((report.initialized | report.skipped).items()))
        raise UserError(f"{source}: these are not the weights of {config.model.name}: {name}: {why}.")
    mean, std = resolve_normalization(config.data, config.model.name, model.in_chans)
    transform = ImageTransform(config.augment, model.img_size, mean, std)
    model.requires_grad_(False)
    # A model may have more outputs than the data had classes (model.num_classes).
    names = (*names, *map(str, range(len(names), classes))) if names else ()
    return LoadedRun(model.eval(), transform, names, config, source)


def leading_size(state: StateDict, model_name: str, layer: str, dim: int) -> int | None:
    """The size of a dimension of the classifier's or the first convolution's weight, wherever the model has them."""
    layers: Any = {"classifier": "head", "first_conv": "patch_embed.proj"}[layer]
    if model_name.startswith(TIMM_PREFIX):
        from timm.models import get_pretrained_cfg

        published = get_pretrained_cfg(model_name.removeprefix(TIMM_PREFIX))
        layers = getattr(published, layer, None)
    first = layers if isinstance(layers, str) else next(iter(layers or ("",)))
    weight = state.get(f"{first}.weight")
    return weight.shape[dim] if isinstance(weight, torch.Tensor) and weight.ndim > dim else None


def _find(path: Path, kind: Kind | None) -> tuple[Path, RunWeights]:
    """The folder with the options, and the weights."""
    if path.is_file():
        if not is_run(path.parent):
            raise UserError(f"{path}: a file of weights alone does not tell its model; name the folder of a run.")
        return path.parent, RunWeights(path, "ema" if "ema" in path.stem else "raw")
    if not path.exists():
        raise UserError(f"{path}: there is no such run.{_runs_nearby(path)}")
    if not is_run(path):
        raise UserError(
            f"{path}: not the folder of a run (no config.yaml), nor of a checkpoint (no meta.json).{_runs_nearby(path)}"
        )
    return path, find_run_weights(path, kind)


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run or of a checkpoint."""
    return (folder / "config.yaml").is_file() or (folder / "meta.json").is_file()


def _runs_nearby(path: Path) -> str:
    near = sorted(str(each) for top in (path, path.parent, Path("runs")) for each in top.glob("*") if is_run(each))
    return f" There are {', '.join(dict.fromkeys(near[:3]))}." if near else ""


def _read_config(folder: Path, overrides: Sequence[str]) -> Config:
    if (folder / "meta.json").is_file():
        return build_config(with_current_names(_read_record(folder)["config"]), overrides)
    return load_recipe(folder / "config.yaml", overrides)


def _read_record(folder: Path) -> dict[str, Any]:
    """What a checkpoint or a run says of itself."""
    from vit_scale.checkpoints.run_dir import read_summary

    if not (folder / "meta.json").is_file():
        return read_summary(folder)
    try:
        return json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: its meta.json cannot be read ({error})") from error
