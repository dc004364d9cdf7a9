"""Parameters and multiply-accumulates of a model, for one image, and what a training step spends.

Three conventions are in print for the cost of a forward pass; all of them are called "FLOPs" somewhere:

- MACs of matrix products and convolutions: torchvision's tables, most papers ("17.6 GFLOPs" for ViT-B/16);
- the same plus 5 operations for each LayerNorm element: timm's csv files;
- 2 x MACs, multiplications and additions apart: torch's FlopCounterMode, open_clip. MFU is counted so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from torch import nn

from vit_scale.models.drop_path import drop_path_rates
from vit_scale.models.variants import Variant
from vit_scale.report.counter import Trace, trace
from vit_scale.report.meta import meta_twin, unwrap
from vit_scale.report.parts import MAC_PARTS, params_by_part

Checkpointing = Literal["none", "selective", "full"]

CLOSED_FORM = "closed form"
META_TRACE = "traced on meta"


@dataclass(frozen=True)
class BlockShape:
    """What training cost depends on besides MACs; only plain ViTs have it."""

    depth: int
    patches: int
    prefix_tokens: int
    skips_dropped_paths: bool
    """Stochastic depth can leave out the computation (ours), not only its result (timm's)."""


@dataclass(frozen=True)
class ModelCount:
    """Exact counts; MACs are those of one image's forward pass."""

    params_by_part: dict[str, int]
    macs_by_part: dict[str, int]
    norm_elements: int
    method: str
    blocks: BlockShape | None = None

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
        """Forward and backward pass by convention: 3 x forward. MFU is counted with this one."""
        return 3 * self.flops

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
        """What a training step really spends on an image, on average.

        `batch` is the number of images in a forward pass: `skip` computes whole samples, so small batches save a
        little less. Models that are not plain ViTs spend the nominal cost, recomputation aside.
        """
        parts = self._without_dropped_patches(patch_dropout)
        branches = parts["attention_projections"] + parts["attention_products"] + parts["mlp"] + parts["other"]
        rest = sum(parts.values()) - branches
        skips = self.blocks is not None and self.blocks.skips_dropped_paths and drop_path_mode == "skip"
        if self.blocks is not None and skips:
            rates = drop_path_rates(drop_path, self.blocks.depth, drop_path_schedule)
            branches = round(branches * sum(_computed_share(rate, batch) for rate in rates) / len(rates))
        recomputed = {"none": 0, "selective": branches // 2, "full": branches}[activation_checkpointing]
        return 2 * (3 * (branches + rest) + recomputed)

    def _without_dropped_patches(self, patch_dropout: float) -> dict[str, int]:
        parts = {part: self.macs_by_part.get(part, 0) for part in MAC_PARTS}
        if self.blocks is None or patch_dropout == 0:
            return parts
        tokens = self.blocks.patches + self.blocks.prefix_tokens
        kept = kept_patches(self.blocks.patches, patch_dropout) + self.blocks.prefix_tokens
        for part in ("attention_projections", "mlp"):
            parts[part] = parts[part] * kept // tokens
        parts["attention_products"] = parts["attention_products"] * kept**2 // tokens**2
        return parts


def kept_patches(patches: int, patch_dropout: float) -> int:
    """Patch tokens that stay in training."""
    return max(1, int(patches * (1 - patch_dropout)))


def _computed_share(rate: float, batch: int | None) -> float:
    return 1 - rate if batch is None else max(1, ceil(batch * (1 - rate) - 1e-9)) / batch
