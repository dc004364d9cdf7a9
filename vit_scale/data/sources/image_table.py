"""Datasets of image files: their paths as an arrow column, next to other columns."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

_CHUNK = 1 << 16  # Rows per chunk of an arrow column, so that no chunk reaches the 2 GB of its offsets.


def image_column(paths: Sequence[str | None]) -> Any:
    """Return files as an arrow column of images."""
    import pyarrow as pa

    chunks = []
    for start in range(0, max(1, len(paths)), _CHUNK):
        part = pa.array(paths[start : start + _CHUNK], pa.string())
        chunks.append(pa.StructArray.from_arrays([pa.nulls(len(part), pa.binary()), part], ["bytes", "path"]))
    return pa.chunked_array(chunks)


def make_dataset(columns: Mapping[str, Any], features: Mapping[str, Any]) -> Any:
    """Return a dataset of arrow columns.

    Its fingerprint depends on their content alone: `datasets` would pickle all of it to compute one.
    """
    import datasets
    import pyarrow as pa

    table = pa.table(dict(columns))
    state = hashlib.sha256(repr(dict(features)).encode())
    for batch in table.to_batches(max_chunksize=_CHUNK):
        state.update(batch.serialize())
    info = datasets.DatasetInfo(features=datasets.Features(features))
    return datasets.Dataset(table, info=info, fingerprint=state.hexdigest()[:16])
