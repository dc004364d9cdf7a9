"""A custom task in one file: predict the mean color of an image. Also a script that trains it.

Usage: mean_color.py RUN_DIR [section.option=value ...], under any launcher.
"""

from __future__ import annotations

import sys

from torch import Tensor, nn

import vit_scale
from vit_scale.data.batch import Batch
from vit_scale.data.targets import NoTarget
from vit_scale.models import construct_from_config
from vit_scale.tasks.task import Inputs, Means, Metric, Task

RECIPE = {
    "model": {"name": "vit_mu", "img_size": 8, "patch_size": 2, "drop_path": 0.1},
    "data": {"source": "embedded:digits", "workers": 0},
    "schedule": {"steps": 16},
    "batch": {"global": 32, "micro": 8},
    "ema": {"decay": 0.9},
    "run": {"log_every": 1, "eval_every": 8, "save_every": 4},
    "track": {"wandb": "disabled"},
}


class MeanColor(Task):
    """Regression of the mean of each channel; needs no labels."""

    name = "mean_color"
    metrics = (Metric("error", "error", higher=False, percent=False),)
    target = NoTarget()

    def build(self) -> nn.Module:
        return construct_from_config(self.config.model, num_classes=self.in_chans, in_chans=self.in_chans)

    def inputs(self, batch: Batch, step: int) -> Inputs:
        images = self.normalized(batch)
        return Inputs((images.to(self.dtype),), {"color": images.mean((2, 3))})

    def loss(self, outputs: Tensor, inputs: Inputs) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(outputs.float(), inputs.rest["color"])}

    def evaluator(self, *, inspect: bool) -> Means:
        return Means(self._errors, self.device)

    def _errors(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        color = self.normalize(batch.images.to(self.device)).mean((2, 3))
        return {"error": (outputs.float() - color).abs().mean(1)}


if __name__ == "__main__":
    vit_scale.train(RECIPE, [f"run.dir={sys.argv[1]}", *sys.argv[2:]], task=MeanColor)
