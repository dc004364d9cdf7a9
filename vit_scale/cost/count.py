"""Parameters and multiply-accumulates (MACs) per image of a model, and FLOPs per image of a training step.

Three conventions are in use for the cost of a forward pass; each is called "FLOPs" somewhere:

- MACs of matmuls and convolutions: torchvision's tables, most papers ("17.6 GFLOPs" for ViT-B/16);
- the same plus 5 operations per LayerNorm element: timm's csv files;
- 2 x MACs, counting multiplications and additions separately: torch's FlopCounterMode, open_clip, and MFU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from vit_scale.cost.closed_form import (
    Checkpointing,
    block_macs,
    computed_fraction,
    computed_tokens,
    feature_macs,
    head_macs,
    last_matmul_macs,
    macs_by_part,
    mae_decoder_macs,
    norm_elements,
    recomputed_blocks,
    training_tokens,
)
from vit_scale.cost.meta import full_shape, twin, unwrap
from vit_scale.cost.parts import params_by_part
from vit_scale.models.decoders.mae import MaeDecoder
from vit_scale.models.interface import backbone_of
from vit_scale.models.layers.drop_path import drop_path_rates
from vit_scale.models.variants import Variant
from vit_scale.models.vit import VisionTransformer

CLOSED_FORM = "closed form"
TRACED = "traced on the meta device"


@dataclass(frozen=True)
class ModelCount:
    """Exact counts; MACs are per image of a forward pass."""

    params_by_part: dict[str, int]
    macs_by_part: dict[str, int]
    norm_elements: int
    """LayerNorm elements per image."""
    method: str
    """How the MACs were counted: CLOSED_FORM or TRACED."""
    variant: Variant | None = None
    """Architecture of a vit_scale model; None for other models."""
    frozen_params: int = 0
    """Parameters that are not trained."""
    frozen_macs: int = 0
    """MACs of layers without trained parameters before the first trained one; counted for models that are traced."""
    frozen_layers: int = 0
    """Leading layers that are not trained, as `ImageModel.frozen_layers`."""

    @property
    def params(self) -> int:
        """Total number of parameters."""
        return sum(self.params_by_part.values())

    @property
    def trained_params(self) -> int:
        """Number of parameters that are trained."""
        return self.params - self.frozen_params

    @property
    def macs(self) -> int:
        """MACs of matmuls and convolutions (torchvision's convention)."""
        return sum(self.macs_by_part.values())

    @property
    def macs_timm_csv(self) -> int:
        """MACs plus 5 operations per LayerNorm element (the convention of timm's csv files)."""
        return self.macs + 5 * self.norm_elements

    @property
    def flops(self) -> int:
        """2 x MACs (the convention of torch's counter and open_clip)."""
        return 2 * self.macs

    @property
    def attention_fraction(self) -> float:
        """Fraction of the MACs in attention, including its projections."""
        return self._fraction("attention_projections", "attention_matmuls")

    @property
    def quadratic_fraction(self) -> float:
        """Fraction of the MACs between queries, keys and values; in full attention they grow quadratically."""
        return self._fraction("attention_matmuls")

    def _fraction(self, *parts: str) -> float:
        return sum(self.macs_by_part.get(part, 0) for part in parts) / max(1, self.macs)

    @property
    def nominal_train_flops_per_image(self) -> int:
        """FLOPs of forward and backward pass by convention: 3 x forward."""
        return 3 * self.flops

    @property
    def _trains_only_head(self) -> bool:
        return self.variant is not None and self.frozen_layers > self.variant.depth + 1

    def at_size(self, side: int) -> ModelCount:
        """Return the count for square images of another size; unchanged for models not from vit_scale."""
        if self.variant is None:
            return self
        variant = replace(self.variant, img_size=(side, side))
        return replace(self, macs_by_part=macs_by_part(variant), norm_elements=norm_elements(variant), variant=variant)

    def train_flops_per_image(
        self,
        drop_path: float = 0.0,
        patch_dropout: float = 0.0,
        activation_checkpointing: Checkpointing = "none",
        *,
        drop_path_schedule: Literal["linear", "uniform"] = "linear",
        drop_path_mode: Literal["skip", "mask"] = "skip",
        batch: int | None = None,
    ) -> int:
        """Return the FLOPs per image actually executed in a training step, on average.

        `batch`, the micro-batch size, affects only `skip`: it rounds up to whole images, so small batches save
        slightly less. For timm models, which do not skip and whose patch dropout is not traced, this is 3 x forward,
        and 4 x forward for the blocks with checkpointing. Frozen layers have a forward pass only.
        """
        patch, head = self.macs_by_part.get("patch", 0), self.macs_by_part.get("head", 0)
        if self.variant is None:
            trained = self.macs - self.frozen_macs
            recomputable = max(0, trained - head - (0 if self.frozen_layers else patch))
            recomputed = 0 if activation_checkpointing == "none" else recomputable
            return 2 * (self.frozen_macs + 3 * trained + recomputed)
        tokens = training_tokens(self.variant, patch_dropout)
        # The image needs no gradient, so the patch embedding costs 2 x its forward pass, or 1 x if it is frozen, and so
        # does a head below which everything is frozen.
        total: float = (1 if self.frozen_layers else 2) * patch
        total += (2 if self._trains_only_head else 3) * head_macs(self.variant, tokens)
        rates = drop_path_rates(drop_path, self.variant.depth, drop_path_schedule)
        recomputes = recomputed_blocks(self.variant.depth, activation_checkpointing)
        for index, (rate, first, recompute) in enumerate(
            zip(rates, computed_tokens(self.variant), recomputes, strict=True)
        ):
            block = sum(block_macs(self.variant, index, tokens, first).values())
            if index + 1 < self.frozen_layers:
                total += block
                continue
            fraction = computed_fraction(rate, drop_path_mode, batch)
            work = fraction * block
            total += 3 * work - fraction * feature_macs(self.variant, index, tokens, first)
            if recompute:
                total += work - (last_matmul_macs(self.variant, first or tokens) if rate == 0 else 0)
        return round(2 * total)


@dataclass(frozen=True)
class DecoderCount(ModelCount):
    """Counts of a decoder, whose blocks have no stochastic depth and no patch dropout."""

    decoder: MaeDecoder | None = None

    def at_size(self, side: int) -> ModelCount:
        """Return the count for square images of another size."""
        assert self.decoder is not None
        return _count_decoder(self.decoder, (side, side))


def count_model(model: nn.Module, img_size: tuple[int, int] | None = None, in_chans: int | None = None) -> ModelCount:
    """Count a model, on any device, without modifying it or running it.

    vit_scale models and decoders are counted in closed form. Other models are traced through one forward pass on the
    meta device; `img_size` and `in_chans` default to the model's.
    """
    model = unwrap(model)
    params, layers = params_by_part(model), getattr(model, "frozen_layers", 0)
    frozen = _frozen_params(model)
    if isinstance(model, VisionTransformer):
        variant = model.variant
        macs, elements = macs_by_part(variant), norm_elements(variant)
        return ModelCount(params, macs, elements, CLOSED_FORM, variant, frozen, frozen_layers=layers)
    if isinstance(model, MaeDecoder):
        return _count_decoder(model, img_size or model.img_size)
    from vit_scale.cost.trace import trace  # Slow import, not needed otherwise.

    size: tuple[int, int] = img_size or model.img_size  # type: ignore[assignment]
    channels: int = in_chans or model.in_chans  # type: ignore[assignment]
    traced = trace(twin(model), size, channels)
    frozen_macs = traced.frozen_macs if layers else 0
    return ModelCount(
        params, dict(traced.macs), traced.norm_elements, TRACED, None, frozen, frozen_macs, frozen_layers=layers
    )


def _count_decoder(decoder: MaeDecoder, img_size: tuple[int, int]) -> DecoderCount:
    variant = replace(decoder.variant, img_size=img_size)
    macs = mae_decoder_macs(variant, decoder.encoder_dim, decoder.mask_ratio)
    elements = norm_elements(variant) - variant.num_prefix_tokens * variant.embed_dim  # The last norm skips them.
    return DecoderCount(params_by_part(decoder), macs, elements, CLOSED_FORM, decoder=decoder)


def _frozen_params(model: nn.Module) -> int:
    return sum(full_shape(p).numel() for p in model.parameters() if not p.requires_grad)


def count_trained(model: nn.Module) -> ModelCount:
    """Count all parameters of the model that is trained; of a composite, MACs are those of its backbone."""
    count = count_model(backbone_of(model))
    added = sum(full_shape(p).numel() for p in model.parameters()) - count.params
    parts = count.params_by_part | {"other": count.params_by_part["other"] + added}
    return replace(count, params_by_part=parts, frozen_params=_frozen_params(model))
