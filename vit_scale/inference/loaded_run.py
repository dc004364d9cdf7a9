"""Load a run directory: model, transform, task and class names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from vit_scale.checkpoints.run_weights import Kind, RunWeights, StateDict, find_run_weights, split_composite
from vit_scale.config import Config, with_current_names
from vit_scale.data.batch import DataInfo
from vit_scale.errors import UserError
from vit_scale.inference.image_transform import ImageTransform
from vit_scale.models.composite import BACKBONE
from vit_scale.models.interface import ImageModel, backbone_of
from vit_scale.models.variants import TIMM_PREFIX, resolve_variant
from vit_scale.models.weights.load import fit_weights, grid_of
from vit_scale.models.weights.resample import Grid
from vit_scale.recipe import build_config, load_recipe
from vit_scale.tasks import task_class
from vit_scale.tasks.classify.classification import Classification
from vit_scale.tasks.task import Task


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with its task and transform."""

    model: ImageModel
    """In evaluation mode, on the CPU. Tasks may build a composite, whose image model is `backbone`."""
    transform: ImageTransform
    """Maps a path, Pillow image or array to the model's input, without the batch dimension."""
    class_names: tuple[str, ...]
    """Names of the classes; empty if unknown."""
    config: Config
    """The options of the run."""
    task: Task
    """The task that the model was trained for."""
    weights: str
    """Description of the weights."""
    is_ema: bool = False
    """Whether they are EMA weights."""
    folder: Path | None = None
    """The run directory."""
    record: dict[str, Any] = field(default_factory=dict)
    """summary.json of the run, or meta.json of the checkpoint: results, versions, commit."""

    @property
    def backbone(self) -> ImageModel:
        """The image model: inside of a composite, or the model itself."""
        return backbone_of(self.model)

    def with_class_names(self, names: tuple[str, ...]) -> LoadedRun:
        """Return the same model with names for its classes."""
        task = type(self.task)(self.task.config, self.task.info._replace(class_names=names))
        return replace(self, class_names=names, task=task)


def load_run(
    path: str | Path,
    *,
    weights: Kind | None = None,
    overrides: Sequence[str] = (),
    task_type: type[Task] | None = None,
) -> LoadedRun:
    """Load the model of a run, finished or in progress. The data is not needed.

        run = vit_scale.load_run("runs/digits")
        logits = run.model(run.transform("seven.png")[None])
        print(run.class_names[logits.argmax()])

    `path`: a run directory (its final weights, or those of its latest valid checkpoint), a checkpoint, or a weights
    file in either. `weights`: `ema` or `raw`; None: EMA weights if the run has them. `overrides`: options to change,
    as on the command line (`model.img_size=384` resamples the position embeddings). `task_type`: the class that was
    passed to training instead of the one of `task.name`. Raises `UserError` if there is no such run, no weights yet, or
    if it was trained with another task.
    """
    folder, found = _find(Path(path), weights)
    record, trained_with = _read_record(folder), _read_config(folder, ())
    config = _read_config(folder, overrides) if overrides else trained_with
    _check_task(path, record, task_type or task_class(config))
    loaded = build_loaded(
        config,
        found.read(),
        source=str(found),
        names=tuple(record.get("class_names") or ()),
        in_chans=record.get("in_chans"),
        trained_with=trained_with,
        task_type=task_type,
    )
    run_folder = folder.parent.parent if (folder / "meta.json").is_file() else folder
    return replace(loaded, weights=str(found), is_ema=found.kind == "ema", folder=run_folder, record=record)


def load_encoder(path: str | Path, *, weights: Kind | None = None, overrides: Sequence[str] = ()) -> LoadedRun:
    """Load the image model of a run of any task, without the layers that its task added, as `load_run` does.

    It has the classifier that the weights have, or none.
    """
    folder, found = _find(Path(path), weights)
    record, trained_with = _read_record(folder), _read_config(folder, ())
    config = _read_config(folder, overrides) if overrides else trained_with
    state = split_composite(found.read())[0]
    classes = leading_size(state, config.model.name, "classifier", 0) or 0
    names = tuple(record.get("class_names") or ())
    loaded = build_encoder(
        replace(config, model=replace(config.model, num_classes=classes)),
        state,
        source=str(found),
        names=names if len(names) <= classes else (),
        in_chans=record.get("in_chans"),
        trained_with=trained_with,
        task_type=Classification,
    )
    run_folder = folder.parent.parent if (folder / "meta.json").is_file() else folder
    return replace(loaded, weights=str(found), is_ema=found.kind == "ema", folder=run_folder, record=record)


def _check_task(path: str | Path, record: dict[str, Any], chosen: type[Task]) -> None:
    """Raise `UserError` if the run was trained with another task than `chosen`."""
    trained = (record.get("task") or {}).get("name", chosen.name)  # not recorded by earlier versions
    if trained != chosen.name:
        raise UserError(f"{path} was trained with task {trained!r}; pass task_type= to load_run")


def build_loaded(
    config: Config,
    state: StateDict,
    *,
    source: str,
    names: tuple[str, ...],
    in_chans: int | None = None,
    trained_with: Config | None = None,
    task_type: type[Task] | None = None,
) -> LoadedRun:
    """Build the model of `config` with these weights, all of which must be used, and its transform."""
    name, classes = config.model.name, config.model.num_classes
    if classes is None and not names:  # the number of classes is not recorded
        classes = leading_size(state, name, "classifier", 0)
    # Runs of earlier versions did not record the number of channels.
    channels = config.model.in_chans or in_chans or leading_size(state, name, "first_conv", 1) or 3
    # The kernel that a run was trained with may be unavailable here.
    options = replace(config, model=replace(config.model, kernel="auto", num_classes=classes))
    task = (task_type or task_class(config))(options, DataInfo(0, channels, names))
    model = cast(ImageModel, task.build_to_evaluate())
    _load_all(model, state, name=name, source=source, grid=grid_of((trained_with or config).model))
    transform = ImageTransform(config.augment, backbone_of(model).img_size, *task.normalization)
    model.requires_grad_(False)
    # A model may have more outputs than the data has classes (model.num_classes).
    more = tuple(map(str, range(len(names), classes or 0))) if names else ()
    return LoadedRun(model.eval(), transform, names + more, config, task, source)


def build_encoder(config: Config, state: StateDict, **options: Any) -> LoadedRun:
    """Build an image model with or without a classifier, as `build_loaded` does.

    A model with mean pooling has its last norm after pooling. One that was trained without pooling, such as the encoder
    of a masked autoencoder, has it before: its tokens are normalized, then pooled.
    """
    model = config.model
    if model.num_classes or model.name.startswith(TIMM_PREFIX) or "norm.weight" not in state:
        return build_loaded(config, state, **options)
    variant = resolve_variant(model)
    if not variant.norm_after_pool:
        return build_loaded(config, state, **options)
    loaded = build_loaded(replace(config, model=replace(model, pool="tokens")), state, **options)
    backbone: Any = loaded.backbone
    backbone.variant = replace(backbone.variant, pool=variant.pool, fc_norm=False)
    return replace(loaded, config=config)


def _load_all(model: ImageModel, state: StateDict, *, name: str, source: str, grid: Grid | None) -> None:
    """Load weights into a model, all of which must be used; only those of the backbone are fitted to the image size."""
    backbone = backbone_of(model)
    if backbone is model and any(key.startswith(BACKBONE) for key in state):  # a part of a composite was enough
        state = {key.removeprefix(BACKBONE): tensor for key, tensor in state.items() if key.startswith(BACKBONE)}
    prefix = "" if backbone is model else "backbone."
    inner = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    report = fit_weights(backbone, inner, source=source, grid=grid)
    if report.initialized or report.skipped:
        tensor, reason = next(iter((report.initialized | report.skipped).items()))
        raise UserError(f"{source}: not the weights of {name}: {prefix}{tensor}: {reason}.")
    if prefix:
        fitted = {prefix + key: tensor for key, tensor in backbone.state_dict().items()}
        try:
            model.load_state_dict(state | fitted)
        except RuntimeError as error:
            raise UserError(f"{source}: not the weights of this task: {' '.join(str(error).split())}") from error


def leading_size(state: StateDict, model_name: str, layer: str, dim: int) -> int | None:
    """Return the size of a dimension of the weight of the classifier or the first convolution; None if not found."""
    layers: Any = {"classifier": "head", "first_conv": "patch_embed.proj"}[layer]
    if model_name.startswith(TIMM_PREFIX):
        from timm.models import get_pretrained_cfg

        published = get_pretrained_cfg(model_name.removeprefix(TIMM_PREFIX))
        layers = getattr(published, layer, None)
    first = layers if isinstance(layers, str) else next(iter(layers or ("",)))
    weight = state.get(f"{first}.weight")
    return weight.shape[dim] if isinstance(weight, torch.Tensor) and weight.ndim > dim else None


def _find(path: Path, kind: Kind | None) -> tuple[Path, RunWeights]:
    """Return the directory with the options, and the weights."""
    if path.is_file():
        if not is_run(path.parent):
            raise UserError(f"{path}: a weights file alone does not define its model; pass a run directory.")
        return path.parent, RunWeights(path, "ema" if "ema" in path.stem else "raw")
    if not path.exists():
        raise UserError(f"{path}: run not found.{_runs_nearby(path)}")
    if not is_run(path):
        raise UserError(
            f"{path}: neither a run directory (no config.yaml) nor a checkpoint (no meta.json).{_runs_nearby(path)}"
        )
    return path, find_run_weights(path, kind)


def is_run(folder: Path) -> bool:
    """Return whether this is a run directory or a checkpoint."""
    return (folder / "config.yaml").is_file() or (folder / "meta.json").is_file()


def _runs_nearby(path: Path) -> str:
    near = sorted(str(each) for top in (path, path.parent, Path("runs")) for each in top.glob("*") if is_run(each))
    return f" Runs: {', '.join(dict.fromkeys(near[:3]))}." if near else ""


def _read_config(folder: Path, overrides: Sequence[str]) -> Config:
    if (folder / "meta.json").is_file():
        return build_config(with_current_names(_read_record(folder)["config"]), overrides)
    return load_recipe(folder / "config.yaml", overrides)


def _read_record(folder: Path) -> dict[str, Any]:
    """Read meta.json of a checkpoint, or summary.json of a run."""
    from vit_scale.checkpoints.run_dir import read_summary

    if not (folder / "meta.json").is_file():
        return read_summary(folder)
    try:
        return json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot read meta.json ({error})") from error
