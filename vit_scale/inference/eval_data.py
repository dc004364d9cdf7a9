"""The images to evaluate on, and which class of the model each of their labels is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vit_scale.config import Config, DataConfig
from vit_scale.data.batch import ImageSource
from vit_scale.data.data import check_labels, open_data
from vit_scale.data.sources.splits import open_splits
from vit_scale.errors import UserError

_SHOWN = 3


@dataclass(frozen=True)
class EvalData:
    """Labelled images."""

    source: ImageSource
    class_names: tuple[str, ...]
    split: str
    description: str
    """One line for people."""


def open_eval_data(config: Config, data: str | None, split: str | None) -> EvalData:
    """The images of `split` (default: those the run was evaluated on) of the run's data, or of other `data`."""
    options = config.data if data is None else _other_source(config.data, data)
    if split not in (None, "train", "val"):
        options = replace(options, val_split=split)
    elif data is not None and (only := _only_split(options)):
        # A lone folder of images is there to be evaluated on; nothing is held out of it.
        options, split = replace(options, train_split=only, val_split=only), only
    opened = open_data(options, seed=config.run.seed)
    source = opened.train if split == "train" else opened.val
    check_labels(source, opened.num_classes)
    words = f"{options.source}, {split or 'val'}: {len(opened.class_names):,} classes"
    return EvalData(source, opened.class_names, split or "val", words)


def _other_source(options: DataConfig, source: str) -> DataConfig:
    """The options that belong to the model and the machine stay; those that belong to the old source do not."""
    return DataConfig(
        source=source, workers=options.workers, on_error=options.on_error, mean=options.mean, std=options.std
    )


def _only_split(options: DataConfig) -> str | None:
    if options.source == "synthetic":
        return None
    splits = list(open_splits(options))
    return splits[0] if len(splits) == 1 else None


def match_classes(
    data_names: tuple[str, ...], model_names: tuple[str, ...], num_classes: int, *, by_number: bool = False
) -> torch.Tensor | None:
    """The model's class for each label of the data, by name; None where they are the same.

    Raises `UserError` where the data has classes that the model does not know. `by_number`: names do not matter.
    """
    if by_number or not model_names or not _tell_apart(data_names):
        if len(data_names) > num_classes:
            raise UserError(f"the data has {len(data_names):,} classes, the model only {num_classes:,}")
        return None
    if data_names == model_names[: len(data_names)]:
        return None
    number = {name: i for i, name in enumerate(model_names)}
    unknown = [name for name in data_names if name not in number]
    if unknown:
        raise UserError(
            f"the data has classes that the model does not know: {_some(unknown)}; "
            f"the model knows {_some(model_names)}.\n"
            "If they are the same under other names and in the same order, add --by-number."
        )
    return torch.tensor([number[name] for name in data_names])


def _tell_apart(names: tuple[str, ...]) -> bool:
    """Whether names say more than the numbers 0, 1, 2, ... that stand in where a dataset has none."""
    return names != tuple(map(str, range(len(names))))


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
