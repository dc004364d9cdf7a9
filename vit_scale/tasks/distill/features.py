"""Match the patch tokens of chosen blocks: `distill.features`.

Shapes: B batch, N tokens, G patches, D token width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vit_scale.errors import UserError
from vit_scale.models.composite import Composite
from vit_scale.models.vit import VisionTransformer

Grid = tuple[int, int]


class FeatureStudent(Composite):
    """A ViT with a projection of its patch tokens to the teacher's width for each pair of blocks.

    In training it returns (logits, projected tokens of each pair), in evaluation the logits alone.
    """

    def __init__(self, backbone: nn.Module, blocks: Sequence[int], width: int) -> None:
        super().__init__(backbone)
        self.matched = tuple(blocks)
        self.projections = nn.ModuleList(nn.Linear(self.backbone.embed_dim, width) for _ in blocks)  # type: ignore[arg-type]

    def forward(self, x_BCHW: Tensor) -> Any:
        """Compute logits, and in training projected tokens, in one pass."""
        if not self.training:
            return self.backbone(x_BCHW)
        logits, tokens = logits_and_tokens(self.backbone, x_BCHW, self.matched)
        return logits, [project(x_BGD) for project, x_BGD in zip(self.projections, tokens, strict=True)]


def logits_and_tokens(model: Any, x_BCHW: Tensor, blocks: Sequence[int]) -> tuple[Any, list[Tensor]]:
    """Return the outputs of a ViT, ours or timm's, and its patch tokens after each of `blocks`, from one pass.

    The model is called as a module: a strategy gathers its weights in that call.
    """
    if not blocks:
        return model(x_BCHW), []
    if isinstance(model, VisionTransformer):
        return model(x_BCHW, intermediates=tuple(blocks))
    with _recorded(model, blocks) as found:
        logits = model(x_BCHW)
    return logits, [found[block][:, model.num_prefix_tokens :] for block in blocks]


@contextmanager
def _recorded(model: Any, blocks: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Record the output of blocks of a timm model; only inside, so that no hook stays on the model."""
    found: dict[int, Tensor] = {}
    handles = [
        model.blocks[block].register_forward_hook(lambda _module, _inputs, out, block=block: found.update({block: out}))
        for block in set(blocks)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def check_blocks(model: Any, blocks: Sequence[int], name: str, who: str) -> None:
    """Raise `UserError` unless `model` is a ViT with these blocks."""
    count = len(model.blocks) if _is_vit(model) else 0
    if not count:
        raise UserError(f"distill.features: the {who}, {name}, has no transformer blocks on a grid of patches")
    if wrong := [block for block in blocks if block >= count]:
        raise UserError(f"distill.features: the {who}, {name}, has blocks 0 to {count - 1}, not {wrong[0]}")


def _is_vit(model: Any) -> bool:
    is_listed = isinstance(getattr(model, "blocks", None), nn.ModuleList | nn.Sequential)
    return is_listed and hasattr(model, "num_prefix_tokens") and model.patch_size is not None


def grid_of(model: Any, size: Sequence[int]) -> Grid:
    """Return rows and columns of patches of images of this size."""
    return size[0] // model.patch_size[0], size[1] // model.patch_size[1]


def to_grid(tokens_BGD: Tensor, old: Grid, new: Grid) -> Tensor:
    """Interpolate patch tokens from one grid to another."""
    if old == new:
        return tokens_BGD
    maps_BDHW = tokens_BGD.float().transpose(1, 2).unflatten(2, old)
    maps_BDHW = F.interpolate(maps_BDHW, new, mode="bilinear", antialias=True)
    return maps_BDHW.flatten(2).transpose(1, 2)
