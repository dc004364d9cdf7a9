"""Draw the training images as the model receives them: augmented, normalized, mixed, with labels and mixing weights."""

from __future__ import annotations

from typing import cast

import torch
from PIL import Image

from vit_scale.config import Config
from vit_scale.data.augment.transforms import TrainTransform
from vit_scale.data.batch import Batch
from vit_scale.data.data import Data, open_data
from vit_scale.data.image_grid import caption, draw_grid, to_pil_images
from vit_scale.data.loading.loaders import Loading, TrainLoader
from vit_scale.data.mixing import Mixing
from vit_scale.data.normalize import Normalize, Values, resolve_normalization
from vit_scale.data.sampling import TrainIndices
from vit_scale.data.targets import ClassTarget
from vit_scale.models import create_from_config
from vit_scale.models.interface import ImageModel


def preview(config: Config, step: int = 0, count: int = 16) -> Image.Image:
    """Draw a grid of the first images of a step's global batch as they reach the model."""
    data = open_data(config.data, seed=config.run.seed)
    num_classes = config.model.num_classes or data.num_classes
    in_chans = config.model.in_chans or data.in_chans
    with torch.device("meta"):  # Only the sizes of the model are needed.
        model = cast(ImageModel, create_from_config(config.model, num_classes=num_classes, in_chans=in_chans))
    mean, std = resolve_normalization(config.data, config.model.name, in_chans)
    batch = _load_batch(config, data, model, (mean, std), step, count)
    mixing = Mixing(
        config.augment,
        num_classes=num_classes,
        global_batch=config.batch.global_,
        seed=config.run.seed,
        patch_size=model.patch_size,
    )
    images, targets = mixing(Normalize(mean, std)(batch.images), batch.target["label"], step=step, offset=0)
    captions = [caption(row, data.class_names) for row in targets]
    return draw_grid(to_pil_images(images, mean, std), captions)


def _load_batch(
    config: Config, data: Data, model: ImageModel, normalization: tuple[Values, Values], step: int, count: int
) -> Batch:
    indices = TrainIndices(
        global_batch=config.batch.global_,
        micro_batch=_largest_divisor(config.batch.global_, count),
        start_step=step,
        end_step=step + 1,
        seed=config.run.seed,
        images=data.info.images,
        repeats=config.augment.repeats,
    )
    transform = TrainTransform(config.augment, model.img_size, *normalization)
    loading = Loading(model.in_chans, config.data.on_error)
    return next(iter(TrainLoader(data.train, transform, indices, ClassTarget(), loading)))


def _largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(min(limit, number), 0, -1) if number % divisor == 0)
