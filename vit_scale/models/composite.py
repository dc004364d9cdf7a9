"""A model of several parts: an image model and the layers that a task adds to it."""

from __future__ import annotations

from typing import Any

from torch import nn

from vit_scale.checkpoints.run_weights import BACKBONE
from vit_scale.models.interface import ImageModel


class Composite(nn.Module):
    """Base class for a backbone with further layers, such as a decoder or a segmentation head.

    A subclass adds its layers in `__init__` and writes `forward`. Here is all that training calls otherwise
    (`ImageModel`): the backbone's, under names that start with `backbone.`. Added layers have the layer id of the
    backbone's head, and weight decay except for vectors. Override `no_weight_decay` for tokens and position embeddings.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone: ImageModel = backbone  # type: ignore[assignment]

    @property
    def num_classes(self) -> int:
        return self.backbone.num_classes

    @property
    def in_chans(self) -> int:
        return self.backbone.in_chans

    @property
    def img_size(self) -> tuple[int, int]:
        return self.backbone.img_size

    @property
    def patch_size(self) -> tuple[int, int] | None:
        return self.backbone.patch_size

    @property
    def frozen_layers(self) -> int:
        return self.backbone.frozen_layers

    @property
    def num_layers(self) -> int:
        return self.backbone.num_layers

    def layer_id(self, name: str) -> int:
        """Return the depth of the parameter `name`; added layers are as deep as the backbone's head."""
        if name.startswith(BACKBONE):
            return self.backbone.layer_id(name.removeprefix(BACKBONE))
        return self.num_layers - 1

    def no_weight_decay(self) -> set[str]:
        """Return the backbone's parameters without weight decay; vectors never have it."""
        return {BACKBONE + name for name in self.backbone.no_weight_decay()}

    def set_activation_checkpointing(self, mode: str) -> None:
        """Recompute activations of backbone blocks."""
        self.backbone.set_activation_checkpointing(mode)

    def allow_any_size(self) -> None:
        """Accept images of other sizes from now on; raise `UserError` if the backbone cannot."""
        self.backbone.allow_any_size()

    def compile_blocks(self, **options: Any) -> None:
        """Compile each block of the backbone in place."""
        self.backbone.compile_blocks(**options)
