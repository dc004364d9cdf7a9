"""Which tokens of a ViT are patches, and where they are in the image."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from vit_scale.errors import UserError
from vit_scale.models.attention_weights import has_attention_weights, reads_class_token


class TokenLayout(NamedTuple):
    """Tokens of an image: first the prefix tokens (class, distillation, registers), then the patches row by row."""

    prefix: int
    grid: tuple[int, int]
    """Rows and columns of patches."""
    patch: tuple[int, int]
    """Height and width of a patch in pixels."""
    class_token: bool
    """Whether the first token is a class token."""
    head_reads_class_token: bool

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def query(self) -> str:
        """The query whose attention is shown: what the head reads."""
        return "class token" if self.head_reads_class_token else "mean of the patches"

    def maps(self, rows_BHN: Tensor) -> Tensor:
        """Return attention to patches as maps [B, H, rows, columns]; each sums to one without prefix tokens' share."""
        return rows_BHN[..., self.prefix :].unflatten(-1, self.grid)


def token_layout(model: Any, size: tuple[int, int], name: str = "") -> TokenLayout:
    """Return the layout of images of `size`; raises `UserError` for a model without plain attention over patches."""
    name = name or type(model).__name__
    patch = getattr(model, "patch_size", None)
    if not isinstance(model, nn.Module) or not has_attention_weights(model) or patch is None:
        raise UserError(
            f"{name}: no attention to look at. Models with plain attention between all patches have it: the ViTs of "
            "this project and timm's VisionTransformer family; not convolutional networks, Swin or MaxViT."
        )
    has_class_token = isinstance(getattr(model, "cls_token", None), Tensor)
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    grid = (size[0] // patch[0], size[1] // patch[1])
    return TokenLayout(prefix, grid, (int(patch[0]), int(patch[1])), has_class_token, reads_class_token(model))


def check_tokens(weights_BHNN: Tensor, layout: TokenLayout, block: int, name: str = "the model") -> None:
    """Raise `UserError` if a block has other tokens than prefix tokens and patches."""
    if weights_BHNN.shape[-1] != layout.tokens:
        raise UserError(
            f"{name}: block {block} has {weights_BHNN.shape[-1]} tokens, not {layout.prefix} prefix tokens and "
            f"{layout.grid[0]} x {layout.grid[1]} patches: which token is where is unknown."
        )
