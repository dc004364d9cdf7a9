"""Image classification with MixUp, CutMix, label smoothing and progressive image sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vit_scale.config import Config
from vit_scale.cost.meta import build_on_meta
from vit_scale.data.batch import Batch, DataInfo
from vit_scale.data.mixing import Mixing
from vit_scale.errors import UserError
from vit_scale.models import construct_from_config
from vit_scale.models.interface import backbone_of
from vit_scale.schedule import Plan
from vit_scale.tasks.classify.class_weights import class_weights, describe_class_weights
from vit_scale.tasks.classify.evaluator import ClassificationEvaluator
from vit_scale.tasks.classify.image_grids import batch_grid
from vit_scale.tasks.classify.loss import classification_loss
from vit_scale.tasks.task import Card, Inputs, Metric, Show, Task


class Classification(Task):
    """One label per image."""

    name = "classify"
    commands = ("eval", "predict")
    metrics: tuple[Metric, ...] = (
        Metric("top1", "top-1", title="Top-1 accuracy"),
        Metric("top5", "top-5", brief=False, title="Top-5 accuracy"),
        Metric("loss", "loss", higher=False, percent=False, title="Loss"),
    )

    def __init__(self, config: Config, info: DataInfo, plan: Plan | None = None) -> None:
        super().__init__(config, info, plan)
        classes = config.model.num_classes
        self.num_classes = len(info.class_names) if classes is None else classes
        if self.num_classes < len(info.class_names):
            raise UserError(f"model.num_classes = {classes}: the data has {len(info.class_names)} classes")
        if self.num_classes <= 5:  # top-5 would always be 100%
            self.metrics = tuple(replace(each, shown=each.name != "top5") for each in self.metrics)
        # Without a plan nothing is trained, and the images of each class may not have been counted.
        self.class_weights = class_weights(config, info, self.num_classes) if plan is not None else None
        self.multiple = 2 if config.augment.mixup or config.augment.cutmix else 1

    def build(self) -> nn.Module:
        return construct_from_config(self.config.model, num_classes=self.num_classes, in_chans=self.in_chans)

    def inputs(self, batch: Batch, step: int) -> Inputs:
        images, target = self.mixed(batch, step)
        return Inputs((self.progressive(images, step).to(self.dtype),), {"target": target})

    def mixed(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Return normalized and mixed images at the model's own size, in fp32, and soft targets."""
        assert self.plan is not None
        images = self.normalized(batch)
        labels = batch.target["label"].to(self.device, non_blocking=True)
        offset = int(batch.positions[0]) % self.plan.global_batch
        return self.mixing(images, labels, step=step, offset=offset)

    def loss(self, outputs: Any, inputs: Inputs) -> dict[str, Tensor]:
        target = inputs.rest["target"]
        return {"loss": classification_loss(self.config.optim.loss, outputs, target, self.class_weights)}

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        super().to(device, dtype)
        if self.class_weights is not None:
            self.class_weights = self.class_weights.to(device)

    def header(self) -> dict[str, str]:
        weights = self.class_weights
        return {} if weights is None else {"class weights": describe_class_weights(self.config, weights)}

    def evaluator(self, *, inspect: bool) -> ClassificationEvaluator:
        return ClassificationEvaluator(self, inspect=inspect)

    def show_batch(self, inputs: Inputs, out: Show) -> None:
        images, target = inputs.args[0], inputs.rest["target"]
        smoothing = self.config.augment.label_smoothing
        out.image(
            "batch",
            lambda: batch_grid(images, target, self.normalization, self.output_names, smoothing),
            title="Training batch",
            caption="images as the model receives them, after augmentation and mixing",
        )

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """Name of each output of the model."""
        return tuple(map(self.info.class_name, range(self.num_classes)))

    def card(self) -> Card:
        return Card("image-classification", f"({self.num_classes:,} classes)")

    @cached_property
    def mixing(self) -> Mixing:
        """MixUp and CutMix of the run."""
        assert self.plan is not None
        plan, augment = self.plan, self.config.augment
        return Mixing(
            augment,
            num_classes=self.num_classes,
            global_batch=plan.global_batch,
            seed=self.config.run.seed,
            patch_size=backbone_of(build_on_meta(self.build)).patch_size if augment.mix_patches else None,
            off_from_step=plan.steps - plan.unmixed_steps if plan.unmixed_steps else None,
        )
