"""Attention during training: distance and entropy over the steps, and "Where it looks" at the last evaluation.

The loop knows when it is due (`Plan.is_looked_at`, `track.images`) and nothing else of it. A few images are enough,
always the same: each rank measures all of them, so the numbers do not depend on the number of ranks.
"""

from __future__ import annotations

from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit_scale.attention_report.layout import token_layout
from vit_scale.attention_report.maps import image_maps
from vit_scale.attention_report.measure import AttentionMeter, AttentionStatistics, affordable_spectra
from vit_scale.attention_report.names import DISTANCE, ENTROPY, PICTURE
from vit_scale.attention_report.pictures import overview_picture, spread_blocks
from vit_scale.config import Config
from vit_scale.cost.activations import Precision
from vit_scale.data.augment.transforms import EvalTransform
from vit_scale.data.batch import ImageSource, Sample
from vit_scale.data.eval_images import limit_images
from vit_scale.data.images.decode import UnreadableImage, open_image
from vit_scale.data.sources.streams import StreamSource
from vit_scale.errors import UserError, first_line
from vit_scale.models.attention_weights import has_attention_weights
from vit_scale.models.interface import ImageModel, backbone_of
from vit_scale.tasks.task import Show, Task

IMAGES = 16
"""Validation images that are measured."""
SHOWN_IMAGES = 6
"""Images whose maps are drawn."""
SHOWN_BLOCKS = 4
MAX_PIXELS = 8_000_000
"""Fewer images are measured if they have more pixels in total: each takes two forward passes."""
SPECTRUM_COST = 1_500_000_000
"""As in measure.py: about a second on one core."""


def block_metrics(statistics: AttentionStatistics) -> dict[str, float]:
    """Return distance and entropy of each block, the mean over heads, by name of the metric."""
    found = {}
    for index, block in enumerate(statistics.blocks):
        found[f"{DISTANCE}_block{index}"] = block.distance.mean().item()
        found[f"{ENTROPY}_block{index}"] = block.entropy.mean().item()
    return found


class AttentionWatch:
    """Measures the attention of a model that is being trained on a few validation images."""

    def __init__(self, config: Config, task: Task, source: ImageSource, backbone: ImageModel, precision: Precision):
        """Nothing is read yet. Raises `UserError` if `track.attention_every` is set and the model has no attention.

        `precision`: of the forward pass.
        """
        self.task, self._source, self._config = task, source, config
        self.size, self.channels, self.name = backbone.img_size, backbone.in_chans, config.model.name
        self.is_possible = has_attention_weights(backbone)
        self._half = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        if config.track.attention_every is not None:
            try:
                token_layout(backbone, self.size, self.name)
            except UserError as error:
                raise UserError(f"track.attention_every = {config.track.attention_every}: {error}") from error

    @cached_property
    def images(self) -> Tensor:
        """Some validation images, uint8 [B, C, H, W], spread over the classes; the same on every rank."""
        count = max(1, min(IMAGES, MAX_PIXELS // (self.size[0] * self.size[1])))
        transform, found = EvalTransform(self._config.augment, self.size), []
        for sample in _samples(self._source, count):
            try:
                found.append(np.array(transform(open_image(sample.image, self.channels))))
            except UnreadableImage:
                continue
        shape = (0, self.channels, *self.size)
        return torch.from_numpy(np.stack(found)) if found else torch.empty(shape, dtype=torch.uint8)

    def measure(self, model: nn.Module, *, spectrum: bool = False) -> AttentionStatistics | None:
        """Measure the weights that `model` has now; every rank must call it. None without attention or images.

        `spectrum`: also singular values, which take longest.
        """
        backbone = backbone_of(model)
        if not self.is_possible or not len(self.images):
            return None
        spectra = 0
        if spectrum:
            spectra = affordable_spectra(backbone, token_layout(backbone, self.size), SPECTRUM_COST, at_least=0)
        meter = AttentionMeter(backbone, spectrum_images=spectra, name=self.name)
        with self._autocast():
            meter.add(self._inputs(self.images), torch.arange(len(self.images)))
        # Every rank has measured all images: no sums over ranks.
        return meter.statistics(over_ranks=False)

    def show(self, statistics: AttentionStatistics, out: Show) -> None:
        """Show the table and a picture of some images; every rank must call it."""
        images = self.images[:SHOWN_IMAGES]
        with self._autocast():
            maps = image_maps(backbone_of(out.model), self._inputs(images), self.name)
        out.table(statistics.table())
        blocks = spread_blocks(len(statistics.blocks), SHOWN_BLOCKS)
        out.image(
            PICTURE,
            lambda: overview_picture(images, maps, blocks=blocks, names=[""] * len(images)),
            title="Attention by block",
            caption="rollout and mean over heads, fixed validation images",
        )

    def try_show(self, out: Show) -> AttentionStatistics | None:
        """Measure and show. An unfamiliar model may fail here in any way, which must not stop a run."""
        try:
            statistics = self.measure(out.model, spectrum=True)
            if statistics is not None:
                self.show(statistics, out)
            return statistics
        except Exception as error:  # noqa: BLE001
            out.info(f"No attention statistics: {first_line(error)}.")
            return None

    def _inputs(self, images: Tensor) -> Tensor:
        task = self.task
        return task.normalize(images.to(task.device)).to(task.dtype)

    def _autocast(self) -> Any:
        return torch.autocast(self.task.device.type, self._half or torch.bfloat16, enabled=self._half is not None)


def _samples(source: ImageSource, count: int) -> list[Sample]:
    """Return some samples, always the same, spread over the classes; of a stream the first ones."""
    if isinstance(source, StreamSource):
        return list(islice(source.samples(rank=0, world=1, shuffle_seed=None), count))
    few = limit_images(source, count)
    return [few.read(index) for index in range(min(count, len(few)))]
