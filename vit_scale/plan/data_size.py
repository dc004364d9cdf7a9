"""Number of images, classes and channels of a source: counted if it is on this system, otherwise as recorded here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_scale.config import Config
from vit_scale.data.batch import ImageSource
from vit_scale.data.data import Data, open_data
from vit_scale.data.sources.streams import StreamSource, count_images
from vit_scale.data.targets import ClassTarget
from vit_scale.errors import UserError
from vit_scale.hub import offline
from vit_scale.tasks import task_class

_SAMPLED_FILES = 64


class DataSize(NamedTuple):
    """Size of the data of a run; 0 images: unknown."""

    images: int
    """Training images."""
    classes: int
    """0 if the task needs no labels."""
    channels: int
    val_images: int = 0
    found: str = "dataset card"
    """How the numbers were found."""
    stored_bytes: int | None = None
    """Training images as stored, estimated from a sample; None: unknown."""


# From the dataset cards.
KNOWN_SOURCES = {
    "ILSVRC/imagenet-1k": DataSize(1_281_167, 1000, 3, 50_000),
    "timm/imagenet-1k-wds": DataSize(1_281_167, 1000, 3, 50_000),
    "uoft-cs/cifar10": DataSize(50_000, 10, 3, 10_000),
    "uoft-cs/cifar100": DataSize(50_000, 100, 3, 10_000),
}
_DIGITS = 1_797
_UNKNOWN = DataSize(0, 1000, 3, found="unknown")


def data_size(config: Config, images: int | None = None) -> DataSize:
    """Return the size of the recipe's data; `images` overrides the number of training images.

    Local data and Hub datasets in the local cache are opened and counted; nothing is downloaded. Raises `UserError` if
    local data cannot be opened, or if the number of steps depends on an unknown number of images.
    """
    size = recorded_size(config)
    if is_local(config):
        size = counted_size(open_without_download(config))
    elif not size.images and images is None:
        size = _cached_size(config) or size
    if images is not None:
        size = size._replace(images=images, found="--images")
    if not size.images and config.schedule.steps is None:
        raise UserError(
            f"data.source = {config.data.source!r} [{config.data.train_split}]: the number of training images is "
            "unknown: this is neither a local directory nor a cached Hub dataset.\n"
            "Pass --images N, or set schedule.steps instead of schedule.epochs."
        )
    return _with_model_sizes(size, config)


def recorded_size(config: Config) -> DataSize:
    """Return the size as far as it is known without accessing the data."""
    data = config.data
    size = KNOWN_SOURCES.get(data.source, _UNKNOWN)
    if data.source == "synthetic":
        held_out = max(1, round(data.synthetic_images * data.val_fraction))
        size = DataSize(data.synthetic_images, data.synthetic_classes, data.synthetic_chans, held_out, "options")
    elif data.source == "embedded:digits":  # one split, of which a fraction is held out
        held_out = round(_DIGITS * data.val_fraction)
        size = DataSize(_DIGITS - held_out, 10, 1, held_out, "embedded")
    if data.train_split != "train":
        size = size._replace(images=0)
    return _with_model_sizes(size, config)


def is_local(config: Config) -> bool:
    """Return whether the source is a path on this system."""
    return Path(config.data.source).expanduser().exists()


def open_without_download(config: Config) -> Data:
    """Open the data of a recipe with the targets of its task; a Hub dataset only from the local cache, or as a stream.

    Raises `UserError` if it is not there.
    """
    target, data = task_class(config).make_target(config), config.data
    is_on_hub = not is_local(config) and data.source != "synthetic" and not data.source.startswith("embedded:")
    if not is_on_hub or data.streaming:
        return open_data(data, target, seed=config.run.seed)
    import datasets  # noqa: F401 -- it must not copy the setting below when it is imported

    with offline():
        return open_data(data, target, seed=config.run.seed)


def counted_size(data: Data) -> DataSize:
    """Return the size of opened data."""
    train, val = count_images(data.train), count_images(data.val)
    return DataSize(train, data.num_classes, data.in_chans, val, "counted", _stored_bytes(data.train))


def _cached_size(config: Config) -> DataSize | None:
    """Return the size of a Hub dataset in the local cache, None if it is not there."""
    try:
        return counted_size(open_without_download(config))
    except UserError:
        return None


def _stored_bytes(source: ImageSource) -> int | None:
    if isinstance(source, StreamSource) or len(source) == 0:
        return None
    sample = np.unique(np.linspace(0, len(source) - 1, _SAMPLED_FILES).astype(np.int64)).tolist()
    return round(sum(stored_bytes(source.read(index).image) for index in sample) / len(sample) * len(source))


def stored_bytes(image: object) -> int:
    """Return the bytes of an image as stored: a file, its contents, or pixels."""
    if isinstance(image, str):
        return os.path.getsize(image) if os.path.exists(image) else 0
    return memoryview(image).nbytes  # type: ignore[arg-type]


def _with_model_sizes(size: DataSize, config: Config) -> DataSize:
    has_classes = isinstance(task_class(config).make_target(config), ClassTarget)
    return size._replace(
        classes=(config.model.num_classes or size.classes) if has_classes else 0,
        channels=config.model.in_chans or size.channels,
    )
