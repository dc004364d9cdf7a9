"""Images per second of the loader, compared with what the devices of this machine ask for."""

from __future__ import annotations

import io
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.cost.closed_form import macs_by_part
from vit_scale.cost.hardware import peak
from vit_scale.data.augment.transforms import TrainTransform
from vit_scale.data.batch import Sample
from vit_scale.data.images.decode import open_image
from vit_scale.data.loading.loaders import Loading, TrainLoader
from vit_scale.data.loading.workers import choose_workers
from vit_scale.data.normalize import NORMALIZATIONS
from vit_scale.data.sampling import TrainIndices
from vit_scale.data.targets import ClassTarget
from vit_scale.doctor.check import Check, Setup, broken, slow, works
from vit_scale.doctor.checks.devices import usable_cores
from vit_scale.doctor.checks.precision import fastest
from vit_scale.format import significant
from vit_scale.models.create import create_model
from vit_scale.models.variants import VARIANTS
from vit_scale.strategies.precision import resolve_precision

MODEL = "vit_small_patch16_224"
"""The default model, which asks for many images per second."""
AUGMENT = AugmentConfig(rand_augment="rand-m9-mstd0.5-inc1", erase=0.25)
IMAGE_SIZE = (375, 500)
"""Typical of ImageNet."""
BATCH, GPU_BATCH = 32, 128
LIMIT = "the CPU can train at most"
ADVICE = (
    "more data.workers if there are cores, data.cache=decoded, or images stored at a smaller size; "
    "a larger model asks for fewer images"
)


def loader(setup: Setup) -> Check:
    """Measure JPEG files, decoded and augmented by workers, against the training of ViT-S/16 on all devices."""
    setup.stage(f"measuring the training of {MODEL}")
    needed = max(1, setup.gpus) * training_images_per_second(setup)
    source = JpegSource(_photographs(8))
    workers = max(1, choose_workers(DataConfig(), max(1, setup.gpus), source))  # as each process of a run would
    setup.stage(f"loading with {workers} workers")
    one = loaded_images_per_second(source, workers, seconds=1.0 if setup.quick else 4.0)
    # With GPUs each process has workers of its own, on cores of its own.
    loaded = one * max(1, min(setup.gpus, int(usable_cores()) // workers))
    devices = f"{setup.gpus} GPUs can train" if setup.gpus > 1 else "the GPU can train" if setup.gpus else LIMIT
    processes = f"{workers} {'worker' if workers == 1 else 'workers'}{' per GPU' if setup.gpus else ''}"
    value = f"{significant(loaded, 2)} images/s with {processes}; {devices} {significant(needed, 2)} of ViT-S/16"
    numbers: dict[str, Any] = {"images_per_second": loaded, "needed": needed, "workers": workers}
    if loaded < needed:
        return slow("loader", value, ADVICE, **numbers)
    return works("loader", value, **numbers)


def pixels(setup: Setup) -> Check:
    """Check that a JPEG file is decoded to the pixels that Pillow decodes."""
    file = _photographs(1)[0]
    image = open_image(file, 3)
    ours = image.crop((0, 0, image.width, image.height), (image.height, image.width)).astype(np.int16)
    theirs = np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(np.int16)
    if ours.shape != theirs.shape or np.abs(ours - theirs).mean() > 2:
        return broken("decoding", "simplejpeg and Pillow decode a JPEG file differently", "reinstall both")
    return works("decoding", "simplejpeg and Pillow agree")


@dataclass(frozen=True)
class JpegSource:
    """JPEG files in memory, each of its own class."""

    files: list[bytes]
    name: str = "generated photographs"

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> Sample:
        """Return the file and its label."""
        return Sample(self.files[index], index)

    def read_target(self, index: int) -> int:
        """Return the label alone."""
        return index

    def describe(self, index: int) -> str:
        """Name an image in messages."""
        return f"image {index} of {self.name}"

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Labels of all images."""
        return np.arange(len(self.files), dtype=np.int64)


def loaded_images_per_second(source: JpegSource, workers: int, seconds: float) -> float:
    """Load for some seconds, after the workers have started."""
    mean, std = NORMALIZATIONS["imagenet"]
    batches = TrainLoader(
        source,
        TrainTransform(AUGMENT, (224, 224), mean, std),
        TrainIndices(global_batch=BATCH, micro_batch=BATCH, end_step=100_000, seed=0, images=len(source)),
        ClassTarget(),
        Loading(channels=3, workers=workers, reserved_batches=1),
    )
    running = iter(batches)
    for _ in range(2 * workers):  # What was prepared before the clock started.
        next(running)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        count += len(next(running).images)
    rate = count / (time.perf_counter() - start)
    batches.close()
    return rate


def training_images_per_second(setup: Setup) -> float:
    """Measure forward, backward and AdamW on one GPU in the precision of training; for a CPU return the limit.

    A CPU is limited by its matmuls to far less than what is loaded, so the measurement would take long for nothing.
    """
    device = torch.device(setup.device)
    if not setup.gpus:
        flops_per_image = 3 * 2 * sum(macs_by_part(VARIANTS[MODEL]).values())
        return (peak(device).flops or math.inf) / flops_per_image
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(resolve_precision("auto", device))
    model = create_model(MODEL, num_classes=1000).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images = torch.randn(GPU_BATCH, 3, 224, 224, device=device)
    labels = torch.zeros(GPU_BATCH, dtype=torch.long, device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return GPU_BATCH / fastest(step, device, 3)


def _photographs(count: int) -> list[bytes]:
    """Return JPEG files with as much detail as photographs: about 100 kB each."""
    random, files = np.random.default_rng(0), []
    for _ in range(count):
        height, width = IMAGE_SIZE
        pixels = np.zeros((height, width, 3))
        for scale, strength in ((64, 60), (16, 60), (4, 40), (1, 55)):
            small = random.normal(128, strength, (height // scale + 2, width // scale + 2, 3))
            pixels += np.kron(small, np.ones((scale, scale, 1)))[:height, :width] / 4
        file = io.BytesIO()
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "jpeg", quality=90)
        files.append(file.getvalue())
    return files
