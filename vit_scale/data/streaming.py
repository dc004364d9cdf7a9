"""Reading a dataset while training. Placeholder until the stream loader below is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vit_scale.config import DataConfig
from vit_scale.data.sample import Sample


@dataclass(frozen=True)
class StreamSource:
    """One split, read in order."""

    dataset: Any
    image_column: str
    label_column: str
    name: str
    length: int | None

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> Sample:
        raise NotImplementedError

    def describe(self, index: int) -> str:
        raise NotImplementedError

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        raise NotImplementedError

    def channels(self) -> int:
        return 3


def open_stream(config: DataConfig, seed: int) -> tuple[StreamSource, StreamSource, tuple[str, ...]]:
    raise NotImplementedError
