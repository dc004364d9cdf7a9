"""Load a few training images with the evaluation transform, for computations before training."""

from __future__ import annotations

import numpy as np
import torch

from vit_scale.config import AugmentConfig
from vit_scale.data.augment.transforms import EvalTransform
from vit_scale.data.batch import ImageSource
from vit_scale.data.images.decode import UnreadableImage, open_image
from vit_scale.errors import UserError


def load_sample_images(
    source: ImageSource, count: int, *, augment: AugmentConfig, img_size: tuple[int, int], in_chans: int
) -> torch.Tensor:
    """Load up to `count` images uint8 [B, C, H, W], evenly spread over the source; unreadable ones are skipped."""
    transform = EvalTransform(augment, img_size)
    found = []
    for index in np.unique(np.linspace(0, len(source) - 1, count).astype(np.int64)).tolist():
        try:
            found.append(np.array(transform(open_image(source.read(index).image, in_chans))))
        except UnreadableImage:
            continue
    if not found:
        raise UserError(f"{source.name}: all sampled images are unreadable")
    return torch.from_numpy(np.stack(found))
