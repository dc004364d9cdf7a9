"""What the rest of the toolkit asks of a model, ours or timm's."""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor, nn


def backbone_of(model: nn.Module) -> Any:
    """Return the image model inside a composite of backbone and decoder, or the model itself."""
    return getattr(model, "backbone", model)


class ImageModel(nn.Module):
    """A classifier of images. Used for its type: `create_model` returns modules that have all of this."""

    num_classes: int
    in_chans: int
    img_size: tuple[int, int]
    patch_size: tuple[int, int] | None
    num_layers: int
    """Depths that `layer_id` tells apart; the head's is the last."""

    def forward(self, x_BCHW: Tensor) -> Any:
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are not decayed although they are matrices: tokens, position embeddings."""
        raise NotImplementedError

    def layer_id(self, name: str) -> int:
        """The depth of the parameter `name`, from 0 at the patches."""
        raise NotImplementedError

    def set_activation_checkpointing(self, mode: str) -> None:
        raise NotImplementedError

    def allow_any_size(self) -> None:
        """Take images of other sizes from now on; raises UserError where the model cannot."""
        raise NotImplementedError

    def compile_blocks(self) -> None:
        """Compile each block in place; parameter names stay."""
        raise NotImplementedError


def full_shape(parameter: nn.Parameter) -> Size:
    """Return the shape of the full parameter; a parameter that ZeRO-3 has sharded is empty and one-dimensional."""
    return getattr(parameter, "ds_shape", parameter.shape)
