"""Infinite batches of the same images with the same augmentation: ours, timm, Hugging Face, and decoding alone."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import simplejpeg
import torch
from PIL import Image
from timm_images import FOREVER, TimmImages
from torch.utils.data import DataLoader, Dataset

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.augment.transforms import TrainTransform
from vit_scale.data.loading.loaders import Loading, TrainLoader
from vit_scale.data.normalize import NORMALIZATIONS, Normalize, buffer_for
from vit_scale.data.sampling import TrainIndices
from vit_scale.data.sources.cache import with_cache
from vit_scale.data.sources.table_source import Source
from vit_scale.data.targets import ClassTarget

OURS, CACHED = "vit_scale", "vit_scale cached"
TIMM, HUGGING_FACE = "timm", "with_transform + torchvision v2"
DECODING = "decoding alone"

AUGMENT = AugmentConfig(rand_augment="rand-m9-mstd0.5-inc1", erase=0.25)
MEAN, STD = NORMALIZATIONS["imagenet"]


def build_sides(source: Source, folder: str, size: int, args: argparse.Namespace, scratch: str) -> dict[str, Any]:
    """Return infinite iterators over normalized batches by name; decoding alone yields numbers of images."""
    cache = DataConfig(source=folder, cache="decoded", cache_dir=scratch)
    cached = with_cache(source, cache, img_size=(size, size), in_chans=3)
    return {
        TIMM: timm_batches(folder, size, args),
        HUGGING_FACE: hugging_face_batches(folder, size, args),
        OURS: our_batches(source, size, args),
        CACHED: our_batches(cached, size, args),
        DECODING: decoded_images(source, args),
    }


def our_batches(source: Any, size: int, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield batches as in training."""
    loader = TrainLoader(
        source,
        TrainTransform(AUGMENT, (size, size), MEAN, STD),
        TrainIndices(global_batch=args.batch, micro_batch=args.batch, end_step=FOREVER, seed=0, images=len(source)),
        ClassTarget(),
        Loading(channels=3, workers=args.workers, reserved_batches=1),
    )
    return normalized(loader)


def normalized(loader: TrainLoader) -> Iterator[torch.Tensor]:
    """Yield normalized images; each batch overwrites the one before."""
    normalize, buffer = Normalize(MEAN, STD), None
    for batch in loader:
        buffer = buffer_for(batch.images, buffer)
        yield normalize(batch.images, out=buffer)


def timm_batches(folder: str, size: int, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield batches from timm's `create_loader`."""
    from timm.data import create_loader

    loader = create_loader(
        cast(Any, TimmImages(folder)),
        input_size=(3, size, size),
        batch_size=args.batch,
        is_training=True,
        auto_augment=AUGMENT.rand_augment,
        re_prob=AUGMENT.erase,
        re_mode="pixel",
        interpolation="random",
        color_jitter=0,
        mean=MEAN,
        std=STD,
        num_workers=args.workers,
        pin_memory=False,
        device=torch.device("cpu"),
    )
    return (images for images, _ in loader)


class Repeated(Dataset[Any]):
    """An infinite epoch."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return FOREVER

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


def hugging_face_batches(folder: str, size: int, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield batches from `with_transform` and torchvision transforms v2 on uint8 tensors, as its docs recommend.

    torchvision's RandAugment has 31 magnitudes; 27 corresponds to 9 of 10 in timm.
    """
    from torchvision.transforms import v2

    images = TimmImages(folder)
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandAugment(num_ops=2, magnitude=27, fill=[124, 116, 104]),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
            v2.RandomErasing(p=AUGMENT.erase, value="random"),
            v2.ToPureTensor(),
        ]
    )

    def apply(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"image": [transform(image.convert("RGB")) for image in rows[images.image]]}

    dataset = Repeated(images.dataset.with_transform(apply))
    loader = DataLoader(dataset, batch_size=args.batch, shuffle=True, num_workers=args.workers)
    return (batch["image"] for batch in loader)


class Decoding(Dataset[int]):
    """Full JPEG files decoded in color, `batch` at a time."""

    def __init__(self, source: Source, batch: int):
        self.source, self.batch = source, batch

    def __len__(self) -> int:
        return FOREVER

    def __getitem__(self, index: int) -> int:
        for i in range(index * self.batch, (index + 1) * self.batch):
            image = self.source.read(i % len(self.source)).image
            data = Path(image).read_bytes() if isinstance(image, str) else memoryview(image).cast("B")
            if simplejpeg.is_jpeg(data):
                simplejpeg.decode_jpeg(data, strict=False)
            else:
                Image.open(io.BytesIO(data)).convert("RGB")
        return self.batch


def decoded_images(source: Source, args: argparse.Namespace) -> Iterator[int]:
    """Yield the number of images decoded and discarded."""
    return iter(DataLoader(Decoding(source, args.batch), batch_size=None, num_workers=args.workers))
