"""A look at a few training images as evaluation would show them, for what is made from the data before training."""

from __future__ import annotations

import numpy as np
import torch

from vit_scale.config import AugmentConfig
from vit_scale.data.augment.transforms import EvalTransform
from vit_scale.data.batch import ImageSource
from vit_scale.data.images.decode import BrokenImage, open_picture
from vit_scale.errors import UserError


def glance(
    source: ImageSource, count: int, *, augment: AugmentConfig, img_size: tuple[int, int], in_chans: int
) -> torch.Tensor:
    """Up to `count` images uint8 [B, C, H, W], evenly over the source; broken ones are left out."""
    transform = EvalTransform(augment, img_size)
    found = []
    for index in np.unique(np.linspace(0, len(source) - 1, count).astype(np.int64)).tolist():
        try:
            found.append(np.array(transform(open_picture(source.read(index).image, in_chans))))
        except BrokenImage:
            continue
    if not found:
        raise UserError(f"{source.name}: of the images looked at, none can be read")
    return torch.from_numpy(np.stack(found))
