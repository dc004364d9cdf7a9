"""The images to evaluate on, and the mapping from their labels to the classes of the model."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from vit_scale.config import DataConfig
from vit_scale.data.batch import ImageSource
from vit_scale.data.data import check_labels, open_data
from vit_scale.data.eval_images import limit_images
from vit_scale.data.sources.splits import open_splits
from vit_scale.data.targets import Target
from vit_scale.errors import UserError
from vit_scale.format import some
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.tasks.classify.classification import Classification


@dataclass(frozen=True)
class EvalData:
    """Images to evaluate on."""

    source: ImageSource
    class_names: tuple[str, ...]
    split: str
    description: str
    """One line for the terminal."""
    notes: tuple[str, ...] = ()
    """Files that are not read, for the user."""


def open_eval_data(loaded: LoadedRun, data: str | None, split: str | None, target: Target | None = None) -> EvalData:
    """Open `split` (default: the validation images of the run) of the run's data, or of other `data`.

    The images come with `target`, by default that of the run's task.
    """
    config, options = loaded.config, loaded.config.data
    target = target or loaded.task.make_target(config)
    splits: tuple[str, ...] = ()
    if data is not None:
        options, splits = other_source(options, data, target)
    if split not in (None, "train", "val"):
        options = replace(options, val_split=split)
    elif len(splits) == 1:
        # Evaluate on all images of a single directory; nothing is held out of it.
        split = splits[0]
        options = replace(options, train_split=split, val_split=split)
    opened = open_data(options, target, seed=config.run.seed)
    source = limit_images(opened.train if split == "train" else opened.val, config.run.eval_images)
    # Not the description of both splits: a single directory is both.
    classes = f", {opened.num_classes:,} classes" if opened.class_names else ""
    description = f"{options.source}, {split or 'val'}{classes}"
    return EvalData(source, opened.class_names, split or "val", description, opened.file_notes)


def other_source(options: DataConfig, source: str, target: Target) -> tuple[DataConfig, tuple[str, ...]]:
    """Return options for another source, and the names of its splits.

    The configuration and the splits of the run's source do not apply. Its columns and its table of labels do, if the
    other source has them.
    """
    options = replace(options, source=source, name=None, train_split="train", val_split=None, streaming=False)
    if options.labels is not None and not (Path(source).expanduser() / options.labels).is_file():
        options = replace(options, labels=None)
    if source == "synthetic":
        return options, ()
    splits = open_splits(options, target).by_name
    found = {column for dataset in splits.values() for column in dataset.features}
    columns = {field.name: getattr(options, field.name) for field in fields(options) if field.name.endswith("_column")}
    missing: dict[str, Any] = {option: None for option, column in columns.items() if column not in found}
    return replace(options, **missing), tuple(splits)


def fit_classes(
    loaded: LoadedRun, data: EvalData, *, match_by_index: bool = False
) -> tuple[LoadedRun, torch.Tensor | None]:
    """Check the labels against the classes of the model; return the model and the class of each label.

    A model without class names gets those of the data. Tasks other than classification are returned unchanged. Raises
    `UserError` for invalid labels and unknown classes.
    """
    if not isinstance(loaded.task, Classification):
        return loaded, None
    check_labels(data.source, len(data.class_names))
    classes = loaded.task.num_classes
    relabel = match_classes(data.class_names, loaded.class_names, classes, match_by_index=match_by_index)
    if not loaded.class_names and len(data.class_names) == classes:
        loaded = loaded.with_class_names(data.class_names)
    return loaded, relabel


def match_classes(
    data_names: tuple[str, ...], model_names: tuple[str, ...], num_classes: int, *, match_by_index: bool = False
) -> torch.Tensor | None:
    """Return the class of the model for each label of the data, by name; None if they are identical.

    Raises `UserError` if the data has classes that the model does not have. `match_by_index`: ignore names.
    """
    if match_by_index or not model_names or not _has_names(data_names):
        if len(data_names) > num_classes:
            raise UserError(f"the data has {len(data_names):,} classes, the model only {num_classes:,}")
        return None
    if data_names == model_names[: len(data_names)]:
        return None
    index = {name: i for i, name in enumerate(model_names)}
    unknown = [name for name in data_names if name not in index]
    if unknown:
        raise UserError(
            f"the data has classes that the model does not have: {some(unknown)}; "
            f"classes of the model: {some(model_names)}.\n"
            "If they are the same classes in the same order under other names, add --match-by-index."
        )
    return torch.tensor([index[name] for name in data_names])


def _has_names(names: tuple[str, ...]) -> bool:
    """Return whether these are names, not the numbers 0, 1, 2, ... of a dataset without names."""
    return names != tuple(map(str, range(len(names))))
