"""The validation images that a run evaluates on: all of them, or `run.eval_images`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vit_scale.data.batch import ImageSource
from vit_scale.data.sources.embedded import SyntheticSource
from vit_scale.data.sources.streams import StreamSource
from vit_scale.data.sources.table_source import Source, hold_out


def limit_images(source: ImageSource, count: int | None) -> ImageSource:
    """Return at most `count` images, always the same, spread over the classes; of a stream the first ones."""
    if isinstance(source, StreamSource):
        if count is None or (source.length is not None and source.length <= count):
            return source
        return replace(source, dataset=source.dataset.take(count), length=None if source.length is None else count)
    if count is None or len(source) <= count:
        return source
    if isinstance(source, SyntheticSource):
        return replace(source, length=count)  # its classes take turns
    assert isinstance(source, Source)
    return source.subset(np.flatnonzero(hold_out(source, count / len(source))))
