"""Samples as sources store them, and batches as models receive them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Sample(NamedTuple):
    """One stored image and its target."""

    image: Any
    """File contents as bytes, a file path, or pixels [H, W] or [H, W, C]."""
    target: Any
    """Value read by the task's `Target`: a class index, a stored mask, boxes, captions, or None."""


class DataInfo(NamedTuple):
    """Everything a task may know about its data; can be created without opening the data."""

    images: int
    """Training images; 0 if unknown."""
    in_chans: int
    class_names: tuple[str, ...] = ()
    class_counts: tuple[int, ...] = ()
    """Training images per class; empty if unknown."""

    def class_name(self, index: int) -> str:
        """Return the name of a class, or its number: a model may have more outputs than the data has classes."""
        return self.class_names[index] if index < len(self.class_names) else str(index)


@dataclass
class Batch:
    """A micro-batch of training or evaluation."""

    images: torch.Tensor
    """uint8 [m, C, H, W], in pinned memory if a GPU is available."""
    target: dict[str, torch.Tensor]
    """By kind of target: {"label": int64 [m]}, {"mask": uint8 [m, H, W]}, {"boxes": float32 [N, 4], "class": int64 [N],
    "count": int64 [m]} with the boxes of all images one after another, or {} without a target."""
    positions: torch.Tensor
    """int64 [m]: the global position in training, the image index in evaluation, -1 for padding."""
    sizes: torch.Tensor | None = None
    """int64 [m, 2]: height and width of each image, if the batch pads images of different sizes."""
    texts: list[list[str]] = field(default_factory=list)
    """All captions of each image, or empty. Strings are not tensors, so they are not part of `target`; the task picks
    a caption by (seed, position) and tokenizes it."""

    def first(self, images: int) -> Batch:
        """Return the first images with their targets."""
        boxes = int(self.target["count"][:images].sum()) if "count" in self.target else images
        flat = ("boxes", "class")
        return Batch(
            self.images[:images],
            {name: value[: boxes if name in flat else images] for name, value in self.target.items()},
            self.positions[:images],
            None if self.sizes is None else self.sizes[:images],
            self.texts[:images],
        )

    @property
    def real(self) -> torch.Tensor:
        """bool [m]: False for padding and for images that could not be read."""
        return self.positions >= 0


class ImageSource(Protocol):
    """Images by index. Cheap to send to workers: pixels stay in a memory map or on disk."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """Return the image as stored, and its target."""

    def read_target(self, index: int) -> Any:
        """Return the target alone."""

    def describe(self, index: int) -> str:
        """Name an image in messages: its file if known, otherwise its row."""

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Class indices of all images in the order of `read`; None if the target is not a class."""

    @property
    def name(self) -> str:
        """Name of the source in messages."""
