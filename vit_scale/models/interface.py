"""The interface that the rest of the toolkit requires of a model, ours or timm's."""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor, nn


def backbone_of(model: nn.Module) -> Any:
    """Return the image model inside a composite (models/composite.py), or the model itself."""
    return getattr(model, "backbone", model)


class ImageModel(nn.Module):
    """An image classifier. Used as a type: `create_model` returns modules with all of these members."""

    num_classes: int
    in_chans: int
    img_size: tuple[int, int]
    patch_size: tuple[int, int] | None
    num_layers: int
    """Number of values of `layer_id`; the head has the last one."""
    frozen_layers: int
    """Leading layers that are not trained; `num_layers`: everything except the head (weights/freeze.py)."""

    def forward(self, x_BCHW: Tensor) -> Any:
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        """Return the matrices without weight decay: tokens, position embeddings."""
        raise NotImplementedError

    def layer_id(self, name: str) -> int:
        """Return the depth of the parameter `name`, starting at 0 for the patches."""
        raise NotImplementedError

    def set_activation_checkpointing(self, mode: str) -> None:
        raise NotImplementedError

    def allow_any_size(self) -> None:
        """Accept images of other sizes from now on; raise `UserError` if the model cannot."""
        raise NotImplementedError

    def compile_blocks(self, **options: Any) -> None:
        """Compile each block in place; parameter names do not change."""
        raise NotImplementedError


def full_shape(parameter: nn.Parameter) -> Size:
    """Return the shape of the full parameter; a parameter that ZeRO-3 has sharded is empty and one-dimensional."""
    return getattr(parameter, "ds_shape", parameter.shape)
