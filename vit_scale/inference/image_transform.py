"""The evaluation transform for a single image."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vit_scale.config import AugmentConfig
from vit_scale.data.augment.color_ops import Planes
from vit_scale.data.augment.transforms import EvalTransform
from vit_scale.data.images.decode import UnreadableImage, open_image
from vit_scale.data.normalize import Normalize, Values
from vit_scale.errors import UserError


class ImageTransform:
    """Maps a path, Pillow image, array or the bytes of a file to the tensor [C, H, W] that the model expects.

    Resizes and center-crops as in evaluation, then normalizes.
    """

    def __init__(self, augment: AugmentConfig, img_size: tuple[int, int], mean: Values, std: Values):
        self.img_size, self.mean, self.std = img_size, mean, std
        self._fit = EvalTransform(augment, img_size)
        self._normalize = Normalize(mean, std)

    def __call__(self, image: str | os.PathLike[str] | Image.Image | np.ndarray | bytes) -> torch.Tensor:
        """Transform an image; raises `UserError` if it cannot be read."""
        try:
            planes = self.pixels(image)
        except UnreadableImage as error:
            name = image if isinstance(image, str | os.PathLike) else "the image"
            raise UserError(f"{name}: {error}") from error
        return self.normalize(torch.from_numpy(planes)[None])[0]

    def pixels(self, image: Any) -> Planes:
        """Return uint8 planes [C, H, W] before normalization; raises UnreadableImage."""
        data = os.fspath(image) if isinstance(image, str | Path | os.PathLike) else image
        return self._fit(open_image(data, len(self.mean)))

    def normalize(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Normalize uint8 images."""
        return self._normalize.to(images_BCHW.device)(images_BCHW)

    def __repr__(self) -> str:
        height, width = self.img_size
        return f"ImageTransform({height}x{width}, mean={self.mean}, std={self.std})"
