"""Classification that also learns from a teacher: `distill.teacher`.

In training the teacher sees the student's images after augmentation and mixing. Evaluation is that of classification,
so a trained run needs its teacher no more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vit_scale import gpu
from vit_scale.config import Config
from vit_scale.cost.meta import build_on_meta
from vit_scale.cost.training import CostPart
from vit_scale.data.batch import Batch, DataInfo
from vit_scale.errors import UserError
from vit_scale.format import amount
from vit_scale.models.create import construct_model
from vit_scale.models.interface import backbone_of
from vit_scale.schedule import Plan
from vit_scale.tasks.classify.classification import Classification
from vit_scale.tasks.distill.features import FeatureStudent, check_blocks, grid_of, to_grid
from vit_scale.tasks.distill.logit_cache import LogitCache, check_fixed_inputs, open_cache
from vit_scale.tasks.distill.losses import distillation_loss, feature_loss
from vit_scale.tasks.distill.source import TeacherSource, find_teacher
from vit_scale.tasks.distill.teacher import Teacher, TeacherOutput, half_precision, load_teacher
from vit_scale.tasks.task import Card, Inputs

if TYPE_CHECKING:
    from vit_scale.data.data import Data


class Distillation(Classification):
    """One label per image, and a teacher's outputs."""

    def __init__(self, config: Config, info: DataInfo, plan: Plan | None = None) -> None:
        super().__init__(config, info, plan)
        self.options = config.distill
        self.teacher: Teacher | None = None
        """Loaded by `prepare`; None outside of training."""
        self._teacher_facts: dict[str, str] = {}
        self.cache: LogitCache | None = None
        self.pairs = self.options.features
        check_options(config)

    # ---------------------------------------------------------------------------------------------------- the models

    @cached_property
    def source(self) -> TeacherSource:
        """The teacher by its options; raises `UserError` if there is none or if it does not fit the student."""
        found = find_teacher(self.config, num_classes=self.num_classes, in_chans=self.in_chans)
        name = f"distill.teacher = {found.source}"
        if found.num_classes != self.num_classes:
            raise UserError(f"{name}: it has {found.num_classes:,} classes, the student {self.num_classes:,}")
        if self.in_chans not in (1, found.in_chans):
            plural = "s" if found.in_chans > 1 else ""
            raise UserError(f"{name}: it takes images of {found.in_chans} channel{plural}, the student {self.in_chans}")
        return found

    @cached_property
    def teacher_on_meta(self) -> Any:
        """The teacher's architecture, without weights."""
        return build_on_meta(lambda: construct_model(self.source.model))

    def prepare(self, data: Data) -> None:
        """Read the teacher."""
        self._check_class_names()
        self.teacher = load_teacher(self.source, self.normalization)
        assert self.teacher_on_meta is not None  # built now: ZeRO-3 shards every module that is constructed in `build`
        self._teacher_facts = {"teacher": self.source.model.name, "teacher sha256": self.teacher.sha256}

    def _check_class_names(self) -> None:
        """Raise `UserError` if the teacher's classes are recorded in another order than those of the data."""
        if self.config.data.source == "synthetic":  # its names are numbers
            return
        pairs = zip(self.source.class_names, self.info.class_names, strict=False)
        for index, (theirs, ours) in enumerate(pairs):
            if theirs != ours:
                raise UserError(
                    f"distill.teacher = {self.source.source}: its class {index} is {theirs!r}, but {ours!r} in the "
                    "data; the teacher needs the same classes in the same order"
                )

    def build(self) -> nn.Module:
        model = super().build()
        if _enable_two_heads(model) and self._label_weight == 0:
            raise UserError(
                "distill: a student with a distillation token learns labels with its class head, so the labels need a "
                "weight: use distill.kind=soft or hard with distill.alpha below 1, or a student without that token"
            )
        if not self.pairs:
            return model
        teacher = self.teacher_on_meta
        check_blocks(model, [ours for ours, _ in self.pairs], self.config.model.name, "student")
        check_blocks(teacher, [theirs for _, theirs in self.pairs], self.source.model.name, "teacher")
        return FeatureStudent(model, [ours for ours, _ in self.pairs], teacher.embed_dim)

    def build_to_evaluate(self) -> nn.Module:
        return super().build()

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        super().to(device, dtype)
        if self.teacher is not None:
            self.teacher.to(device, half_precision(self.config, device))

    def precompute(self, data: Data, workers: int) -> None:
        """Compute the teacher's logits for all training images if `distill.cache` requests it, and drop the teacher."""
        if self.options.cache:
            self.cache, self.teacher = open_cache(self, data, workers), None

    @property
    def img_size(self) -> tuple[int, int]:
        """Height and width of the student's images."""
        return self._student_on_meta.img_size

    # ----------------------------------------------------------------------------------------------- a training step

    def inputs(self, batch: Batch, step: int) -> Inputs:
        images, target = self.mixed(batch, step)
        # The student's images are a view of these where nothing is resized or cast; the teacher does not change them.
        shown = self.progressive(images, step)
        rest = {"target": target, "teacher": self._teach(batch, images, grid_size=shown.shape[-2:])}
        return Inputs((shown.to(self.dtype),), rest)

    def _teach(self, batch: Batch, images: Tensor, *, grid_size: torch.Size) -> TeacherOutput | None:
        """Return the teacher's outputs, with tokens on the grid of a student that sees images of `grid_size`."""
        if self.cache is not None:
            return TeacherOutput(gpu.upload(self.cache.logits(batch.positions), self.device), [])
        if self.teacher is None:  # a preview of the training images
            return None
        output = self.teacher(images, [theirs for _, theirs in self.pairs])
        if not self.pairs:
            return output
        model = self.teacher.model
        old, new = grid_of(model, model.img_size), grid_of(self._student_on_meta, grid_size)
        return output._replace(tokens=[to_grid(tokens, old, new) for tokens in output.tokens])

    @cached_property
    def _student_on_meta(self) -> Any:
        return backbone_of(build_on_meta(self.build))

    def loss(self, outputs: Any, inputs: Inputs) -> dict[str, Tensor]:
        """Return the weighted sum of the labels' and the teacher's losses, and each of them."""
        options, teacher = self.options, inputs.rest["teacher"]
        assert teacher is not None, "prepare was not called"
        logits, tokens = outputs if self.pairs else (outputs, [])
        class_logits, distill_logits = logits if isinstance(logits, tuple | list) else (logits, logits)
        distill = distillation_loss(options.kind, distill_logits, teacher.logits, options.temperature)
        parts = {"loss": distill, "distill": distill}
        if options.kind != "kl":
            parts["class"] = super().loss(class_logits, inputs)["loss"]
            parts["loss"] = self._label_weight * parts["class"] + options.alpha * distill
        if self.pairs:
            parts["features"] = feature_loss(tokens, teacher.tokens)
            parts["loss"] = parts["loss"] + options.features_weight * parts["features"]
        return parts

    @property
    def _label_weight(self) -> float:
        return 0.0 if self.options.kind == "kl" else 1 - self.options.alpha

    # ------------------------------------------------------------------------------------------- what others are told

    def cost_parts(self, model: nn.Module) -> list[CostPart]:
        parts = super().cost_parts(model)
        if self.options.cache:  # computed before training
            return parts
        return [*parts, CostPart("teacher", self.teacher_on_meta, backward=False, is_resized=False)]

    def facts(self) -> dict[str, Any]:
        return self._teacher_facts

    def header(self) -> dict[str, str]:
        params = sum(p.numel() for p in self.teacher_on_meta.parameters())
        name = self.source.source
        known = "" if name == self.source.model.name else f"{self.source.model.name}, "
        options = describe_distillation(self.config)
        return {**super().header(), "teacher": f"{name} ({known}{amount(params)} parameters; {options})"}

    def card(self) -> Card:
        return replace(super().card(), summary=f"({self.num_classes:,} classes), distilled from a teacher")


def describe_distillation(config: Config) -> str:
    """`soft, alpha 0.5, temperature 2`."""
    options = config.distill
    words: list[str] = [options.kind]
    words += [f"alpha {options.alpha:g}"] if options.kind != "kl" else []
    words += [f"temperature {options.temperature:g}"] if options.kind != "hard" else []
    pairs = len(options.features)
    words += [f"features of {pairs} block{'s' if pairs > 1 else ''}"] if pairs else []
    words += ["logits computed once"] if options.cache else []
    return ", ".join(words)


def check_options(config: Config) -> None:
    """Raise `UserError` for options of `distill` that contradict each other or have no effect."""
    options = config.distill
    if options.kind == "hard" and options.temperature != 1:
        raise UserError(
            f"distill.temperature = {options.temperature:g}: distill.kind = hard learns the teacher's class, at any "
            "temperature the same; use distill.kind=soft or kl"
        )
    if options.kind == "kl" and options.alpha not in (0.5, 1):  # 0.5 is the default
        raise UserError(f"distill.alpha = {options.alpha:g}: distill.kind = kl has no labels; use distill.kind=soft")
    if options.features and config.model.patch_dropout:
        raise UserError("distill.features: needs every patch of the student; set model.patch_dropout=0")
    if options.features and config.parallel.compile and config.model.name.startswith("timm/"):
        raise UserError("distill.features: not supported for timm models with parallel.compile=true")
    if options.cache:
        check_fixed_inputs(config)


def _enable_two_heads(model: Any) -> bool:
    """Let a student with a distillation token return the logits of both heads in training."""
    if getattr(getattr(model, "variant", None), "distilled", False):
        model.distilled_training = True
        return True
    if hasattr(model, "set_distilled_training"):
        model.set_distilled_training(True)
        return True
    return False
