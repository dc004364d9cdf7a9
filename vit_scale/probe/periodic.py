"""k-NN accuracy during training (`run.probe_every`): does a run that learns without labels learn anything?

The loop knows when it is due (`Plan.is_probed`) and nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vit_scale.config import Config
from vit_scale.cost.activations import Precision
from vit_scale.data.augment.transforms import EvalTransform
from vit_scale.data.batch import Batch
from vit_scale.data.data import Data
from vit_scale.data.loading.loaders import EvalLoader, Loading
from vit_scale.data.loading.workers import choose_workers
from vit_scale.data.sampling import EvalIndices
from vit_scale.data.sources.streams import count_images
from vit_scale.data.targets import ClassTarget
from vit_scale.errors import UserError
from vit_scale.models.interface import ImageModel, backbone_of
from vit_scale.models.variants import TIMM_PREFIX, resolve_variant
from vit_scale.probe.features import FeatureModel, FeatureSet, Pooling, compute_features
from vit_scale.probe.knn import knn_predict
from vit_scale.probe.labeled import LabeledImages, label_images, own_rows
from vit_scale.schedule import Plan
from vit_scale.tasks.results import Metric
from vit_scale.tasks.task import Task

MAX_IMAGES = 10_000
"""Most training and most validation images."""
K = 20
"""Neighbors, or as many as there are."""
KNN_TOP1 = Metric("knn_top1", f"{K}-NN", title=f"{K}-NN top-1 accuracy")


def knn_images(config: Config, data: Data) -> LabeledImages | None:
    """Return the images of the k-NN of a run, None without `run.probe_every`; raises `UserError` without labels."""
    if config.run.probe_every is None:
        return None
    most = min(MAX_IMAGES, config.run.eval_images or MAX_IMAGES)
    try:
        return label_images(data, config.data).limited(MAX_IMAGES, most)
    except UserError as error:
        raise UserError(f"run.probe_every = {config.run.probe_every}: k-NN needs labels: {error}") from error


class KnnProbe:
    """Classifies validation images by their nearest training images, with the weights that a model has now."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        task: Task,
        images: LabeledImages,
        backbone: ImageModel,
        rank: int,
        cores: int,
        precision: Precision,
    ) -> None:
        """`rank`: of this process; `cores`: that are for it; `precision`: of the forward pass."""
        self.images, self.task, self._pooling = images, task, _pooling(config)
        self._half = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        target = ClassTarget()
        workers = choose_workers(config.data, cores, images.train)
        self.train, self.val = (
            EvalLoader(
                source,
                EvalTransform(config.augment, backbone.img_size),
                EvalIndices(images=count_images(source), batch=plan.eval_batch, rank=rank, world=plan.processes),
                target,
                Loading(backbone.in_chans, config.data.on_error, workers),
            )
            for source in (images.train, images.val)
        )

    def count(self) -> int:
        """Return the number of batches."""
        return len(self.train) + len(self.val)

    def measure(self, model: nn.Module, advance: Callable[[], None]) -> dict[str, float]:
        """Return the metric by name, on rank 0; nothing on others. Every rank must call it.

        `advance` is called after each batch and may raise.
        """
        train, val = (self._features(model, loader, advance) for loader in (self.train, self.val))
        if not len(train) or not len(val):
            return {}
        ((name, features),) = train.features.items()
        own = own_rows(self.images.val, self.images.train, val.indices, train.indices)
        k = max(1, min(K, len(train) - (own is not None)))
        predicted = knn_predict(
            features,
            train.labels,
            val.features[name],
            [k],
            len(self.images.class_names),
            own_Q=own,
            device=self.task.device,
        )
        return {KNN_TOP1.name: (predicted[k] == val.labels).double().mean().item()}

    def _features(self, model: nn.Module, loader: EvalLoader, advance: Callable[[], None]) -> FeatureSet:
        task, extract = self.task, FeatureModel(backbone_of(model), pooling=self._pooling)

        def prepare(batch: Batch) -> Tensor:
            return task.normalized(batch).to(task.dtype)

        with torch.autocast(task.device.type, self._half or torch.bfloat16, enabled=self._half is not None):
            return compute_features(extract, loader, prepare, task.device, advance=advance)

    def close(self) -> None:
        """Stop the data-loading workers."""
        self.train.close()
        self.val.close()


def _pooling(config: Config) -> Pooling | None:
    """Return what `model.pool` reads, as launch/probe.py does; the task may let the backbone return all tokens."""
    if config.model.name.startswith(TIMM_PREFIX):
        return None
    variant = resolve_variant(config.model)
    return "cls" if variant.pool == "cls" and variant.class_token else "mean"
