"""Class labels next to the images of a run, also if its task does not read them; which images are the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vit_scale.config import DataConfig
from vit_scale.data.batch import ImageSource
from vit_scale.data.data import Data, check_labels
from vit_scale.data.eval_images import limit_images
from vit_scale.data.sources.embedded import SyntheticSource
from vit_scale.data.sources.streams import StreamSource
from vit_scale.data.sources.table_source import Source
from vit_scale.data.targets import ClassTarget, Columns
from vit_scale.errors import UserError


@dataclass(frozen=True)
class LabeledImages:
    """Training and validation images with class labels."""

    train: ImageSource
    val: ImageSource
    class_names: tuple[str, ...]

    def limited(self, train: int | None, val: int | None) -> LabeledImages:
        """Return at most so many images, always the same, spread over the classes."""
        return replace(self, train=limit_images(self.train, train), val=limit_images(self.val, val))


def label_images(data: Data, config: DataConfig) -> LabeledImages:
    """Return the images of `data`, which is that of `config`, with class labels; those without one are left out.

    The images are split as the run splits them. Raises `UserError` if they have no labels.
    """
    if isinstance(data.train, StreamSource) or isinstance(data.val, StreamSource):
        raise UserError("streams are not supported: set data.streaming=false")
    if isinstance(data.train, SyntheticSource):
        names = tuple(map(str, range(data.train.num_classes)))
        return LabeledImages(data.train, data.val, names)
    assert isinstance(data.train, Source)
    assert isinstance(data.val, Source)
    target = ClassTarget()
    columns = target.find(data.train.dataset.features, config)
    names = target.class_names(data.train.dataset, columns, config)
    train, val = (_labeled(each, config, names) for each in (data.train, data.val))
    if len(names) < 2:
        raise UserError(f"data.source={config.source}: all images have the same label, so nothing can be told apart")
    return LabeledImages(train, val, names)


def _labeled(source: Source, config: DataConfig, names: tuple[str, ...]) -> Source:
    target = ClassTarget()
    columns = Columns(target.find(source.dataset.features, config), names)
    source = replace(source, table_targets=target.values(source.dataset, columns))
    assert source.labels is not None
    has_label = source.labels >= 0
    if not has_label.any():
        raise UserError(f"data.source={config.source}: no image of {source.name} has a label")
    source = source if has_label.all() else source.subset(np.flatnonzero(has_label))
    check_labels(source, len(names))
    return source


def own_rows(queries: ImageSource, train: ImageSource, query_indices: Tensor, train_indices: Tensor) -> Tensor | None:
    """Return for each query the row of the training features that is the same image, -1 if there is none.

    None if the sources have no image in common. The indices say which images of the sources there are features of.
    """
    if isinstance(queries, Source) and isinstance(train, Source):
        if queries.dataset is not train.dataset:
            return None
        rows_of = [np.arange(len(each)) if each.rows is None else each.rows for each in (queries, train)]
    elif queries is train:
        rows_of = [np.arange(len(queries)), np.arange(len(train))]
    else:
        return None
    query_rows, train_rows = rows_of[0][query_indices.numpy()], rows_of[1][train_indices.numpy()]
    place = {int(row): i for i, row in enumerate(train_rows)}
    own = torch.tensor([place.get(int(row), -1) for row in query_rows], dtype=torch.int64)
    return own if bool((own >= 0).any()) else None
