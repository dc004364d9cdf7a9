"""The images to evaluate on, and the mapping from their labels to the classes of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vit_scale.config import Config, DataConfig
from vit_scale.data.batch import ImageSource
from vit_scale.data.data import check_labels, open_data
from vit_scale.data.sources.splits import open_splits
from vit_scale.errors import UserError
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.tasks.classify.classification import Classification

_SHOWN = 3


@dataclass(frozen=True)
class EvalData:
    """Images to evaluate on."""

    source: ImageSource
    class_names: tuple[str, ...]
    split: str
    description: str
    """One line for the terminal."""


def open_eval_data(config: Config, data: str | None, split: str | None) -> EvalData:
    """Open `split` (default: the validation images of the run) of the run's data, or of other `data`."""
    options = config.data if data is None else _other_source(config.data, data)
    if split not in (None, "train", "val"):
        options = replace(options, val_split=split)
    elif data is not None and (only := _only_split(options)):
        # Evaluate on all images of a single directory; nothing is held out of it.
        options, split = replace(options, train_split=only, val_split=only), only
    opened = open_data(options, seed=config.run.seed)
    source = opened.train if split == "train" else opened.val
    classes = f"{len(opened.class_names):,} classes"
    return EvalData(source, opened.class_names, split or "val", f"{options.source}, {split or 'val'}: {classes}")


def _other_source(options: DataConfig, source: str) -> DataConfig:
    """Return options for another source; those of the model and the system are preserved."""
    return DataConfig(
        source=source, workers=options.workers, on_error=options.on_error, mean=options.mean, std=options.std
    )


def _only_split(options: DataConfig) -> str | None:
    if options.source == "synthetic":
        return None
    splits = list(open_splits(options))
    return splits[0] if len(splits) == 1 else None


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
            f"the data has classes that the model does not have: {_some(unknown)}; "
            f"classes of the model: {_some(model_names)}.\n"
            "If they are the same classes in the same order under other names, add --match-by-index."
        )
    return torch.tensor([index[name] for name in data_names])


def _has_names(names: tuple[str, ...]) -> bool:
    """Return whether these are names, not the numbers 0, 1, 2, ... of a dataset without names."""
    return names != tuple(map(str, range(len(names))))


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
