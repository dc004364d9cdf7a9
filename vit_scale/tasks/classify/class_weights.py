"""Weight of each class in the loss: `optim.class_weights`."""

from __future__ import annotations

import torch

from vit_scale.config import Config
from vit_scale.data.batch import DataInfo
from vit_scale.errors import UserError


def class_weights(config: Config, info: DataInfo, outputs: int) -> torch.Tensor | None:
    """Return the weight of each output of the model, with mean 1 over the training images as they are drawn.

    The loss is averaged over images, not over weights, so micro-batches and ranks add up to the global batch. Outputs
    without a class have weight 1. Raises `UserError` if the weights do not fit the data.
    """
    requested, classes = config.optim.class_weights, len(info.class_names)
    if requested is None:
        return None
    counts = torch.tensor(info.class_counts, dtype=torch.float64)
    if requested == "balanced":
        weights = _balanced(counts, info)
    elif len(requested) != classes:
        raise UserError(
            f"optim.class_weights: {len(requested)} weights for {classes:,} classes; one per class is needed"
        )
    else:
        weights = torch.tensor(requested, dtype=torch.float64)
    drawn = counts.gt(0).double() if config.data.balance else counts
    if not len(counts):  # a stream, whose classes are counted as equally frequent
        drawn = torch.ones_like(weights)
    scaled = weights * drawn.sum() / (weights * drawn).sum()
    return torch.cat([scaled, scaled.new_ones(outputs - classes)]).float()


def _balanced(counts: torch.Tensor, info: DataInfo) -> torch.Tensor:
    if not len(counts):
        raise UserError(
            "optim.class_weights = balanced: the labels of a stream cannot be counted; "
            "set a list of weights, or data.streaming=false"
        )
    if (counts == 0).any():
        empty = info.class_name(int(counts.argmin()))
        raise UserError(
            f"optim.class_weights = balanced: class {empty!r} has no training images; set a list of weights instead"
        )
    return counts.sum() / (len(counts) * counts)


def describe_class_weights(config: Config, weights: torch.Tensor) -> str:
    """`0.31 to 4.2 (balanced)`."""
    how = "balanced" if config.optim.class_weights == "balanced" else "set by the recipe"
    return f"{weights.min():.3g} to {weights.max():.3g} ({how})"
