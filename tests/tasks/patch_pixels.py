"""A task with a composite model, in one file: reconstruct the pixels of every patch. Also a script that trains it.

Usage: patch_pixels.py RUN_DIR [section.option=value ...], under any launcher.
"""

from __future__ import annotations

import sys

import torch.nn.functional as F
from torch import Tensor, nn

import vit_scale
from vit_scale.data.batch import Batch
from vit_scale.data.targets import NoTarget
from vit_scale.models import construct_from_config
from vit_scale.models.composite import Composite
from vit_scale.tasks.task import Inputs, Means, Metric, Task

RECIPE = {
    "model": {"name": "vit_mu", "img_size": 8, "patch_size": 2, "drop_path": 0.1, "pool": "tokens"},
    "data": {"source": "embedded:digits", "workers": 0},
    "schedule": {"steps": 8, "shape": "constant"},
    "optim": {"lr": 3e-3, "layer_decay": 0.9},
    "batch": {"global": 32, "micro": 16},
    "ema": {"decay": 0.9},
    "run": {"log_every": 1, "eval_every": 8, "save_every": 4},
    "track": {"wandb": "disabled"},
}


class PixelDecoder(Composite):
    """A ViT whose patch tokens are mapped to pixels."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone)
        variant = backbone.variant
        self.prefix = variant.num_prefix_tokens
        self.decoder = nn.Linear(variant.embed_dim, variant.in_chans * variant.patch_size[0] * variant.patch_size[1])

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.decoder(self.backbone(x_BCHW)[:, self.prefix :])


class PatchPixels(Task):
    """Autoencoder; needs no labels."""

    name = "patch_pixels"
    metrics = (Metric("error", "error", higher=False, percent=False),)
    target = NoTarget()

    def build(self) -> nn.Module:
        return PixelDecoder(construct_from_config(self.config.model, num_classes=0, in_chans=self.in_chans))

    def inputs(self, batch: Batch, step: int) -> Inputs:
        images = self.normalized(batch)
        return Inputs((images.to(self.dtype),), {"pixels": self._patches(images)})

    def loss(self, outputs: Tensor, inputs: Inputs) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(outputs.float(), inputs.rest["pixels"])}

    def evaluator(self, *, inspect: bool) -> Means:
        return Means(self._errors, self.device)

    def _patches(self, images: Tensor) -> Tensor:
        size = self.config.model.patch_size
        return F.unfold(images, size, stride=size).transpose(1, 2).contiguous()

    def _errors(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        pixels = self._patches(self.normalize(batch.images.to(self.device)))
        return {"error": (outputs.float() - pixels).abs().mean((1, 2))}


if __name__ == "__main__":
    vit_scale.train(RECIPE, [f"run.dir={sys.argv[1]}", *sys.argv[2:]], task=PatchPixels)
