"""One image, as evaluation sees it."""

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
    """A path, Pillow image, array or bytes of a file to the tensor [C, H, W] that the model takes.

    Resized and cropped in the middle as in evaluation, then normalised.
    """

    def __init__(self, augment: AugmentConfig, img_size: tuple[int, int], mean: Values, std: Values):
        self.img_size, self.mean, self.std = img_size, mean, std
        self._fit = EvalTransform(augment, img_size)
        self._normalize = Normalize(mean, std)

    def __call__(self, image: str | os.PathLike[str] | Image.Image | np.ndarray | bytes) -> torch.Tensor:
        """Raises `UserError` for an image that cannot be read."""
        try:
            planes = self.pixels(image)
        except UnreadableImage as error:
            name = image if isinstance(image, str | os.PathLike) else "the image"
            raise UserError(f"{name}: {error}") from error
        return self.normalize(torch.from_numpy(planes)[None])[0]

    def pixels(self, image: Any) -> Planes:
        """uint8 planes [C, H, W] before they are normalised: what a person would see. Raises UnreadableImage."""
        data = os.fspath(image) if isinstance(image, str | Path | os.PathLike) else image
        return self._fit(open_image(data, len(self.mean)))

    def normalize(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """uint8 images to what the model takes."""
        return self._normalize.to(images_BCHW.device)(images_BCHW)

    def __repr__(self) -> str:
        height, width = self.img_size
        return f"ImageTransform({height}x{width}, mean={self.mean}, std={self.std})"
