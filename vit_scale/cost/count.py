"""Parameters and multiply-accumulates (MACs) of a model, for one image, and what a training step spends on it.

Three conventions are in print for the cost of a forward pass; all of them are called "FLOPs" somewhere:

- MACs of matrix products and convolutions: torchvision's tables, most papers ("17.6 GFLOPs" for ViT-B/16);
- the same plus 5 operations for each LayerNorm element: timm's csv files;
- 2 x MACs, multiplications and additions apart: torch's FlopCounterMode, open_clip; also what MFU is counted in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from vit_scale.cost.closed_form import (
    Checkpointing,
    block_macs,
    computed_share,
    computed_tokens,
    head_macs,
    last_product,
    macs_by_part,
    norm_elements,
    recomputed_blocks,
    training_tokens,
)
from vit_scale.cost.meta import twin, unwrap
from vit_scale.cost.parts import params_by_part
from vit_scale.models.drop_path import drop_path_rates
from vit_scale.models.variants import Variant
from vit_scale.models.vit import VisionTransformer

CLOSED_FORM = "closed form"
TRACED = "traced on the meta device"


@dataclass(frozen=True)
class ModelCount:
    """Exact counts; MACs are those of one image's forward pass."""

    params_by_part: dict[str, int]
    macs_by_part: dict[str, int]
    norm_elements: int
    """Elements that go through a LayerNorm."""
    method: str
    """How the MACs were counted: CLOSED_FORM or TRACED."""
    variant: Variant | None = None
    """The shape of the model where it is one of ours."""

    @property
    def params(self) -> int:
        """All parameters."""
        return sum(self.params_by_part.values())

    @property
    def macs(self) -> int:
        """Matrix products and convolutions (torchvision's convention)."""
        return sum(self.macs_by_part.values())

    @property
    def macs_timm_csv(self) -> int:
        """MACs and 5 operations for each LayerNorm element (the convention of timm's csv files)."""
        return self.macs + 5 * self.norm_elements

    @property
    def flops(self) -> int:
        """2 x MACs (the convention of torch's counter and open_clip)."""
        return 2 * self.macs

    @property
    def attention_share(self) -> float:
        """Share of attention in the MACs, its projections included."""
        return self._share("attention_projections", "attention_products")

    @property
    def quadratic_share(self) -> float:
        """Share of the two products that grow with the square of the number of tokens."""
        return self._share("attention_products")

    def _share(self, *parts: str) -> float:
        return sum(self.macs_by_part.get(part, 0) for part in parts) / max(1, self.macs)

    @property
    def nominal_train_flops_per_image(self) -> int:
        """Forward and backward pass by convention: 3 x forward."""
        return 3 * self.flops

    def at_size(self, side: int) -> ModelCount:
        """The same model on square images of another size; unchanged for models that are not ours."""
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
        """FLOPs that a training step really spends on an image, on average.

        `batch`, the images of a forward pass, matters to `skip` alone: it computes whole images, so that small
        batches save a little less. timm's models neither skip nor are they followed through patch dropout: for them
        this is 3 x forward, and 4 x the blocks under checkpointing.
        """
        patch, head = self.macs_by_part.get("patch", 0), self.macs_by_part.get("head", 0)
        if self.variant is None:
            recomputed = 0 if activation_checkpointing == "none" else self.macs - patch - head
            return 2 * (3 * self.macs + recomputed)
        tokens = training_tokens(self.variant, patch_dropout)
        # Nothing is differentiated with respect to the image, so the patch embedding costs 2 x its forward pass.
        total: float = 2 * patch + 3 * head_macs(self.variant, tokens)
        rates = drop_path_rates(drop_path, self.variant.depth, drop_path_schedule)
        recomputes = recomputed_blocks(self.variant.depth, activation_checkpointing)
        for rate, first, recompute in zip(rates, computed_tokens(self.variant), recomputes, strict=True):
            work = computed_share(rate, drop_path_mode, batch) * sum(block_macs(self.variant, tokens, first).values())
            total += 3 * work
            if recompute:
                total += work - (last_product(self.variant, first or tokens) if rate == 0 else 0)
        return round(2 * total)


def count_model(model: nn.Module, img_size: tuple[int, int] | None = None, in_chans: int | None = None) -> ModelCount:
    """Count a model, live or on the meta device; it is only read, and nothing runs on its weights.

    Our own models are counted by closed form. Others are followed through one forward pass on the meta device, for
    which `img_size` and `in_chans` are by default those the model was made for.
    """
    model = unwrap(model)
    params = params_by_part(model)
    if isinstance(model, VisionTransformer):
        variant = model.variant
        return ModelCount(params, macs_by_part(variant), norm_elements(variant), CLOSED_FORM, variant)
    from vit_scale.cost.trace import trace  # Imports much of torch that nothing else needs.

    size: tuple[int, int] = img_size or model.img_size  # type: ignore[assignment]
    channels: int = in_chans or model.in_chans  # type: ignore[assignment]
    followed = trace(twin(model), size, channels)
    return ModelCount(params, dict(followed.macs), followed.norm_elements, TRACED)
