"""Attention over single images: a map per block and head, and rollout.

Shapes: B images, H heads, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vit_scale.attention_report.layout import TokenLayout, check_tokens, token_layout
from vit_scale.attention_report.statistics import rollout
from vit_scale.models.attention_weights import attention_weights


@dataclass(frozen=True)
class AttentionMaps:
    """How much of the attention each patch receives: a map sums to one, less what prefix tokens receive. On the CPU."""

    layout: TokenLayout
    class_token: list[Tensor] | None
    """Of each block [B, H, rows, columns]: attention of the class token; None without one."""
    patches: list[Tensor]
    """Of each block [B, H, rows, columns]: mean attention of all patches."""
    rollout: Tensor
    """[B, rows, columns]: of what the head reads."""

    @property
    def shown(self) -> list[Tensor]:
        """Return the maps of what the head reads."""
        if self.class_token is not None and self.layout.head_reads_class_token:
            return self.class_token
        return self.patches


def image_maps(model: nn.Module, x_BCHW: Tensor, name: str = "") -> AttentionMaps:
    """Compute the maps of normalized images; under ZeRO-3 every rank must call it."""
    layout = token_layout(model, (x_BCHW.shape[-2], x_BCHW.shape[-1]), name)
    of_class: list[Tensor] = []
    of_patches: list[Tensor] = []

    def recorded() -> Iterator[Tensor]:
        for weights in attention_weights(model, x_BCHW):
            check_tokens(weights, layout, len(of_patches), name)
            rows = weights.float()
            del weights  # Not kept while the next block's are computed.
            of_patches.append(layout.maps(rows[:, :, layout.prefix :].mean(2)).cpu())
            if layout.class_token:
                # A copy: a view would keep the weights of the block.
                of_class.append(layout.maps(rows[:, :, 0].clone()).cpu())
            yield rows
            del rows

    with torch.no_grad():
        product_BNN = rollout(recorded())
    queries = product_BNN[:, :1] if layout.head_reads_class_token else product_BNN[:, layout.prefix :]
    rolled = layout.maps(queries.mean(1, keepdim=True))[:, 0].cpu()
    return AttentionMaps(layout, of_class if layout.class_token else None, of_patches, rolled)
