"""What `distill.teacher` names: the teacher's architecture and normalization, found without reading its weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from vit_scale.checkpoints.run_dir import read_summary
from vit_scale.config import Config, ModelConfig, with_current_names
from vit_scale.data.normalize import Values, resolve_normalization
from vit_scale.errors import UserError
from vit_scale.models.variants import TIMM_PREFIX, check_model_name, resolve_variant
from vit_scale.models.weights.read import is_hub_name
from vit_scale.recipe import build_config, load_recipe


@dataclasses.dataclass(frozen=True)
class TeacherSource:
    """A teacher by its options; enough to plan a run."""

    source: str
    """`distill.teacher`."""
    model: ModelConfig
    """Its architecture, with classes and channels."""
    normalization: tuple[Values, Values]
    """Mean and standard deviation per channel of the images that it was trained with."""
    class_names: tuple[str, ...] = ()
    """Recorded names of its classes; empty if unknown."""
    is_own: bool = False
    """Whether it is a weights file of the student's architecture."""

    @property
    def num_classes(self) -> int:
        assert self.model.num_classes is not None
        return self.model.num_classes

    @property
    def in_chans(self) -> int:
        assert self.model.in_chans is not None
        return self.model.in_chans


def find_teacher(config: Config, *, num_classes: int, in_chans: int) -> TeacherSource:
    """Return what `distill.teacher` names; raises `UserError` if there is no such teacher.

    `num_classes` and `in_chans` are those of the student: a weights file alone does not tell its own.
    """
    source = config.distill.teacher
    assert source is not None
    path = Path(source)
    directory = path if path.is_dir() else path.parent
    if config.distill.teacher_model is not None and not path.is_file():
        raise UserError(
            f"distill.teacher_model = {config.distill.teacher_model}: only for a weights file; "
            f"distill.teacher = {source} is not a file"
        )
    if is_hub_name(source):
        _check_name(source, "distill.teacher")
        return _published(source, source)
    if not path.exists():
        raise UserError(f"distill.teacher = {source}: not found; use timm/<name>, a run directory or a weights file")
    if _is_run(directory) and config.distill.teacher_model is None:
        return _of_run(source, directory)
    if path.is_dir():
        raise UserError(f"distill.teacher = {source}: not a run directory (no config.yaml)")
    return _of_file(config, source, num_classes, in_chans)


def _check_name(name: str, option: str) -> None:
    try:
        check_model_name(name)
    except UserError as error:
        raise UserError(str(error).replace("model.name", option)) from error


def _published(name: str, source: str) -> TeacherSource:
    """Return a teacher with timm's published weights, or a file of the same model."""
    from timm.models import get_pretrained_cfg

    published = get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
    if published is None or not published.has_weights:
        raise UserError(f"distill.teacher = {source}: timm has no weights for {name}; choose another tag or model")
    model = ModelConfig(name=name, num_classes=published.num_classes, in_chans=published.input_size[0])
    return TeacherSource(source, model, (published.mean, published.std))


def _of_file(config: Config, source: str, num_classes: int, in_chans: int) -> TeacherSource:
    """Return a teacher whose weights are in a file, of `distill.teacher_model` or the student's architecture.

    Reading the weights finds out whether they have the student's number of classes.
    """
    name = config.distill.teacher_model
    if name is None:
        model = _as_teacher(config.model, num_classes, in_chans)
        normalization = resolve_normalization(config.data, model.name, in_chans)
        return TeacherSource(source, model, normalization, is_own=True)
    _check_name(name, "distill.teacher_model")
    if name.startswith(TIMM_PREFIX):
        found = _published(name, source)
        return dataclasses.replace(found, model=dataclasses.replace(found.model, num_classes=num_classes))
    channels = resolve_variant(ModelConfig(name=name)).in_chans
    model = ModelConfig(name=name, num_classes=num_classes, in_chans=channels)
    return TeacherSource(source, model, resolve_normalization(type(config.data)(), name, channels))


def _of_run(source: str, directory: Path) -> TeacherSource:
    """Return the model of a run or checkpoint directory, finished or not."""
    record = _read_record(directory)
    if "config" in record:  # a checkpoint
        config = build_config(with_current_names(record["config"]))
    else:
        config = load_recipe(directory / "config.yaml")
    task = (record.get("task") or {}).get("name", config.task.name)
    if task != "classify":
        raise UserError(f"distill.teacher = {source}: was trained with task {task!r}; a teacher must classify")
    names = tuple(record.get("class_names") or ())
    classes = len(names) if config.model.num_classes is None else config.model.num_classes
    if not classes:
        raise UserError(f"distill.teacher = {source}: the number of its classes is not recorded; has the run started?")
    channels = config.model.in_chans or record.get("in_chans") or 3
    model = _as_teacher(config.model, classes, channels)
    return TeacherSource(source, model, resolve_normalization(config.data, model.name, channels), names)


def _as_teacher(model: ModelConfig, num_classes: int, in_chans: int) -> ModelConfig:
    """Return the options of a model that is only evaluated."""
    return dataclasses.replace(
        model,
        weights=None,
        freeze="none",
        kernel="auto",
        init="trunc_normal",
        drop_path=0.0,
        patch_dropout=0.0,
        num_classes=num_classes,
        in_chans=in_chans,
    )


def _is_run(directory: Path) -> bool:
    return (directory / "config.yaml").is_file() or (directory / "meta.json").is_file()


def _read_record(directory: Path) -> dict[str, Any]:
    """Read meta.json of a checkpoint, or summary.json of a run."""
    try:
        return json.loads((directory / "meta.json").read_text())
    except FileNotFoundError:
        return read_summary(directory)
    except (OSError, ValueError) as error:
        raise UserError(f"distill.teacher = {directory}: cannot read meta.json ({error})") from error
