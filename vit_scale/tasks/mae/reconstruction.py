"""What a masked autoencoder makes of images: its loss, and the images with masked patches filled in.

Shapes: B batch, C channels, H W pixels, G patches, P numbers in a patch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from vit_scale.data.batch import Batch
from vit_scale.data.image_grid import draw_grid, to_pil_images
from vit_scale.tasks.mae.patches import from_patches, patch_statistics
from vit_scale.tasks.task import Inputs, Means, Show

if TYPE_CHECKING:
    from vit_scale.tasks.mae.masked_autoencoding import MaskedAutoencoding

SHOWN_IMAGES = 8
_GRAY = 0.5
"""Color of masked patches, of pixels from 0 to 1."""


class ReconstructionEvaluator(Means):
    """Mean loss over masked patches; with `inspect` also the reconstructions of the first images."""

    def __init__(self, task: MaskedAutoencoding, *, inspect: bool) -> None:
        super().__init__(lambda outputs, _: {"loss": task.losses(*outputs)}, task.device)
        self.task, self._inspect = task, inspect
        self._shown: list[tuple[Tensor, ...]] = []
        """Per image on the host: its pixels and the predicted ones [G, P], which are masked [G], and the loss."""

    def add(self, outputs: tuple[Tensor, Inputs], batch: Batch) -> None:
        super().add(outputs, batch)
        if not self._inspect or len(self._shown) >= SHOWN_IMAGES:
            return
        predicted, inputs = outputs
        few = min(SHOWN_IMAGES - len(self._shown), len(predicted))
        pixels, masked = inputs.rest["pixels"], inputs.rest["masked"]
        tensors = (pixels, predicted.float(), masked, self.task.losses(predicted, inputs))
        rows = zip(*(tensor[:few].cpu() for tensor in tensors), strict=True)
        self._shown += [row for row, real in zip(rows, batch.real[:few].tolist(), strict=True) if real]

    def show(self, out: Show) -> None:
        """Show images, what the encoder received, and the reconstructions."""
        if not self._shown:
            return
        pixels, predicted, masked, losses = (torch.stack(each) for each in zip(*self._shown, strict=True))
        out.image(
            "reconstructions",
            lambda: reconstruction_grid(self.task, pixels, predicted, masked, losses.tolist()),
            title="Reconstructions",
            caption=_caption(self.task),
        )


def _caption(task: MaskedAutoencoding) -> str:
    caption = "validation images, what the encoder receives, and the same with predicted patches filled in"
    if task.config.mae.norm_pixels:
        caption += (
            "; the model predicts patches with mean 0 and variance 1, shown with the true mean and variance of each "
            "patch of the original image, which the model does not know"
        )
    return caption


def reconstruction_grid(
    task: MaskedAutoencoding, pixels_BGP: Tensor, predicted_BGP: Tensor, masked_BG: Tensor, losses: list[float]
) -> Image.Image:
    """Draw each image, its visible patches, and those together with the predicted ones."""
    if task.config.mae.norm_pixels:
        mean, std = patch_statistics(pixels_BGP)
        predicted_BGP = predicted_BGP * std + mean
    filled_BGP = torch.where(masked_BG[..., None], predicted_BGP, pixels_BGP)
    grid = task.grid
    visible = _draw_masked(task, pixels_BGP, masked_BG, grid)
    images = _draw(task, pixels_BGP, grid), visible, _draw(task, filled_BGP, grid)
    tiles = [tile for row in zip(*images, strict=True) for tile in row]
    texts = [text for loss in losses for text in ("image", "visible patches", f"reconstruction\nloss {loss:.4f}")]
    return draw_grid(tiles, texts, columns=6)


def masked_batch_grid(task: MaskedAutoencoding, inputs: Inputs) -> Image.Image:
    """Draw the images of a training batch, each next to its visible patches."""
    pixels, masked = (inputs.rest[name][: 2 * SHOWN_IMAGES].cpu() for name in ("pixels", "masked"))
    height, width = inputs.args[0].shape[2:]  # smaller than the model's with augment.progressive
    grid = height // task.patch_size[0], width // task.patch_size[1]
    images = _draw(task, pixels, grid), _draw_masked(task, pixels, masked, grid)
    tiles = [tile for row in zip(*images, strict=True) for tile in row]
    return draw_grid(tiles, ["image", "visible patches"] * len(pixels), columns=min(8, len(tiles)))


def _draw_masked(
    task: MaskedAutoencoding, pixels_BGP: Tensor, masked_BG: Tensor, grid: tuple[int, int]
) -> list[Image.Image]:
    mean, std = (torch.tensor(values) for values in task.normalization)
    gray_C = (_GRAY - mean) / std
    gray_P = gray_C.repeat(pixels_BGP.shape[2] // len(gray_C))
    return _draw(task, torch.where(masked_BG[..., None], gray_P, pixels_BGP), grid)


def _draw(task: MaskedAutoencoding, pixels_BGP: Tensor, grid: tuple[int, int]) -> list[Image.Image]:
    return to_pil_images(from_patches(pixels_BGP, task.patch_size, grid), *task.normalization)
