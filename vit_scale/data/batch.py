"""What a source is to the loaders: images by index, as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Sample(NamedTuple):
    """One image as it is stored and its label."""

    image: Any
    """The bytes of a file, the path of a file, or pixels [H, W] or [H, W, C]."""
    label: int


class DataInfo(NamedTuple):
    """All that a task knows of the data."""

    images: int
    in_chans: int
    class_names: tuple[str, ...] = ()


@dataclass
class Batch:
    """A micro-batch, in training and evaluation."""

    images: torch.Tensor
    """uint8 [m, C, H, W]"""
    target: dict[str, Any]
    positions: torch.Tensor
    """int64 [m]: global position in training, index in evaluation, -1 for padding."""

    @property
    def real(self) -> torch.Tensor:
        """False for padding."""
        return self.positions >= 0


class ImageSource(Protocol):
    """Images by index. Cheap to send to workers: pixels stay in a memory map or on disk."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """The image at `index` as it is stored, and its label."""

    def describe(self, index: int) -> str:
        """How a message names this image: its file where known, else its row."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Labels of all images, in the order of `read`."""

    @property
    def name(self) -> str:
        """How messages name the source."""
