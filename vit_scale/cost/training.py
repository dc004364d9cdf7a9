"""Training cost per image, from the parts that a task names; used by MFU, report, plan and memory model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from vit_scale.config import Config
from vit_scale.cost.activations import (
    Activations,
    Precision,
    measured_activations,
    number_bytes,
    vit_activations,
)
from vit_scale.cost.closed_form import linear_attention_min_tokens, macs_by_part
from vit_scale.cost.count import ModelCount, count_model
from vit_scale.cost.hardware import Peak
from vit_scale.format import giga, memory_size, percent
from vit_scale.models.decoders.mae import MaeDecoder
from vit_scale.models.variants import Variant
from vit_scale.models.vit import VisionTransformer


@dataclass(frozen=True)
class CostPart:
    """A module that training runs, on the meta device or live."""

    label: str
    module: nn.Module
    tokens: float = 1.0
    """Fraction of the patch tokens that it computes (an MAE encoder sees a quarter)."""
    backward: bool = True
    """False for a frozen teacher, which has a forward pass only."""
    images: float = 1.0
    """Forward passes per training image."""
    is_resized: bool = True
    """Whether `augment.progressive` changes the size of its images; not those of a teacher."""

    @cached_property
    def count(self) -> ModelCount:
        """Its parameters and MACs."""
        return count_model(self.module)


@dataclass(frozen=True)
class TrainingCost:
    """FLOPs per training image, forward and backward."""

    flops: dict[str, float]
    """By label of the part."""
    frozen: tuple[str, ...] = ()
    """Labels of the parts with a forward pass only, such as a teacher."""

    @property
    def total(self) -> float:
        return sum(self.flops.values())

    @property
    def of_frozen(self) -> dict[str, float]:
        """FLOPs of the frozen parts, by label; included in `flops` and `total`."""
        return {label: self.flops[label] for label in self.frozen}


def training_cost(parts: list[CostPart], config: Config, *, batch: int | None, side: int | None = None) -> TrainingCost:
    """Count what training executes per image.

    `batch`: images per forward pass if stochastic depth rounds to whole ones, otherwise None. `side`: another image
    size than the model's own.
    """
    flops = {part.label: _flops(part, config, batch, side) for part in parts}
    return TrainingCost(flops, tuple(part.label for part in parts if not part.backward))


def frozen_bytes(parts: list[CostPart], precision: Precision) -> int:
    """Return the bytes of parts that are only run, never trained, on every device."""
    return sum(number_bytes(precision) * part.count.params for part in parts if not part.backward)


def training_activations(
    parts: list[CostPart], config: Config, precision: Precision, *, on_cpu: bool = False
) -> Activations:
    """Return the activations per image of all trained parts; those of a frozen one are not saved.

    `on_cpu`: whether a CPU trains.
    """
    by_part: Counter[str] = Counter()
    recomputed = 0
    for part in (part for part in parts if part.backward):
        activations = _activations(part, config, precision, on_cpu)
        by_part.update({name: round(part.images * size) for name, size in activations.by_part.items()})
        recomputed = max(recomputed, round(part.images * activations.recomputed))
    return Activations(dict(by_part), recomputed)


def _activations(part: CostPart, config: Config, precision: Precision, on_cpu: bool) -> Activations:
    module: Any = part.module
    checkpointing = config.parallel.activation_checkpointing
    if isinstance(module, MaeDecoder):
        # About: it saves the encoder's tokens instead of an image.
        return vit_activations(
            module.variant,
            precision=precision,
            activation_checkpointing=checkpointing,
            kernel=config.model.kernel,
        )
    if isinstance(module, VisionTransformer):
        return _vit_activations(part, module.variant, config, precision, on_cpu)
    if checkpointing != "none":
        module.set_activation_checkpointing(checkpointing)
    return measured_activations(module, module.img_size, module.in_chans, precision)


def _vit_activations(
    part: CostPart, variant: Variant, config: Config, precision: Precision, on_cpu: bool
) -> Activations:
    return vit_activations(
        variant,
        precision=precision,
        drop_path=config.model.drop_path,
        drop_path_schedule=config.model.drop_path_schedule,
        drop_path_mode=config.model.drop_path_mode,
        patch_dropout=1 - part.tokens if part.tokens < 1 else config.model.patch_dropout,
        activation_checkpointing=config.parallel.activation_checkpointing,
        kernel=config.model.kernel,
        frozen_layers=part.module.frozen_layers,  # type: ignore[arg-type]
        on_cpu=on_cpu,
    )


@dataclass(frozen=True)
class AttentionSaving:
    """What a kind of attention costs per image, compared with full attention in all blocks."""

    kind: str
    tokens: int
    macs: int
    macs_full: int
    activation_bytes: int
    activation_bytes_full: int
    min_tokens: int | None = None
    """Number of tokens from which linear attention has fewer MACs; None for other kinds."""

    def describe(self) -> str:
        """Describe it on one line."""
        saving = f"-{percent(1 - self.macs / self.macs_full, 0)}"
        if self.macs >= self.macs_full:
            saving = "saves nothing" + ("" if self.min_tokens is None else f" below {self.min_tokens:,} tokens")
        return (
            f"{self.kind} at {self.tokens:,} tokens: {giga(self.macs)} GMACs per image vs. {giga(self.macs_full)} with "
            f"full attention ({saving}), activations {memory_size(self.activation_bytes)} vs. "
            f"{memory_size(self.activation_bytes_full)}"
        )


def attention_saving(
    parts: list[CostPart], config: Config, precision: Precision, *, on_cpu: bool = False
) -> AttentionSaving | None:
    """Compare the trained model's kind of attention with full attention; None if it is full, or timm's."""
    part = parts[0]
    variant = getattr(part.module, "variant", None)
    if not isinstance(part.module, VisionTransformer) or variant is None or variant.attention == "full":
        return None
    full = replace(variant, attention="full")
    (macs, macs_full), (size, size_full) = (
        [sum(macs_by_part(each).values()) for each in (variant, full)],
        [_vit_activations(part, each, config, precision, on_cpu).total for each in (variant, full)],
    )
    tokens = variant.grid[0] * variant.grid[1] + variant.num_prefix_tokens
    is_linear = variant.attention == "linear"
    min_tokens = linear_attention_min_tokens(variant) if is_linear else None
    return AttentionSaving(variant.attention, tokens, macs, macs_full, size, size_full, min_tokens)


def _flops(part: CostPart, config: Config, batch: int | None, side: int | None) -> float:
    count = part.count
    if side is not None and part.is_resized:
        count = count.at_size(side)
    if not part.backward:
        return part.images * count.flops
    return part.images * actual_train_flops_per_image(count, config, batch, tokens=part.tokens)


def actual_train_flops_per_image(count: ModelCount, config: Config, batch: int | None, *, tokens: float = 1.0) -> float:
    """Return the FLOPs executed per training image: stochastic depth and dropped tokens save, recomputation adds."""
    return count.train_flops_per_image(
        config.model.drop_path,
        1 - tokens if tokens < 1 else config.model.patch_dropout,
        config.parallel.activation_checkpointing,
        drop_path_schedule=config.model.drop_path_schedule,
        drop_path_mode=config.model.drop_path_mode,
        batch=batch,
    )


@dataclass(frozen=True)
class StepCost:
    """FLOPs of a training step and the peak of the device, for MFU."""

    flops_per_image: dict[int | None, float]
    """By image size; None is the model's own. Frozen parts are included."""
    global_batch: int
    processes: int
    peak: Peak
    frozen_per_image: dict[str, float] = field(default_factory=dict)
    """FLOPs of each frozen part, such as a teacher, whatever the image size."""

    def flops(self, side: int | None) -> float:
        """Return the FLOPs of a step over all processes, at an image size."""
        return self.global_batch * self.flops_per_image[side]

    def mfu(self, flops: float, seconds: float) -> float | None:
        """Return the fraction of the peak that `flops` in `seconds` are; None if the peak is unknown."""
        return flops / seconds / (self.peak.flops * self.processes) if self.peak.flops else None
