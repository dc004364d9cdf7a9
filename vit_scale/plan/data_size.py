"""Number of images, classes and channels of a source, as far as known without reading it."""

from __future__ import annotations

from typing import NamedTuple

from vit_scale.config import Config
from vit_scale.errors import UserError


class DataSize(NamedTuple):
    """Size of the training split."""

    images: int
    classes: int
    channels: int


# From the dataset cards.
KNOWN_SOURCES = {
    "ILSVRC/imagenet-1k": DataSize(1_281_167, 1000, 3),
    "timm/imagenet-1k-wds": DataSize(1_281_167, 1000, 3),
    "uoft-cs/cifar10": DataSize(50_000, 10, 3),
    "uoft-cs/cifar100": DataSize(50_000, 100, 3),
}
_DIGITS = DataSize(1_797, 10, 1)
_UNKNOWN = DataSize(0, 1000, 3)


def data_size(config: Config, images: int | None = None) -> DataSize:
    """Return the size of the recipe's data; `images` overrides the known number, 0 images means unknown.

    Raises `UserError` if the number of steps depends on an unknown number of images.
    """
    data, model = config.data, config.model
    known = KNOWN_SOURCES.get(data.source, _UNKNOWN)
    if data.source == "synthetic":
        known = DataSize(data.synthetic_images, data.synthetic_classes, data.synthetic_chans)
    elif data.source == "embedded:digits":  # one split, of which a fraction is held out
        known = _DIGITS._replace(images=_DIGITS.images - round(_DIGITS.images * data.val_fraction))
    if "[" in data.train_split:
        known = known._replace(images=0)
    if images is not None:
        known = known._replace(images=images)
    if not known.images and config.schedule.steps is None:
        raise UserError(
            f"data.source = {data.source!r} [{data.train_split}]: the number of training images is unknown without "
            "reading the data.\nPass --images N, or set schedule.steps instead of schedule.epochs."
        )
    return known._replace(classes=model.num_classes or known.classes, channels=model.in_chans or known.channels)
