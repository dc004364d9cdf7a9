"""Losses on soft targets, always in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def classification_loss(
    kind: str, logits_BC: torch.Tensor, targets_BC: torch.Tensor, weights_C: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean loss over images. `targets_BC` are probabilities, with mixing and smoothing applied.

    `binary` treats each class as a separate binary label, as in DeiT III: a class is present if its target is above
    zero, and the mean is over classes, too.

    `weights_C`: class weights (`optim.class_weights`). Cross entropy weights each term of the sum over classes, like
    torch; `binary` weights an image by the mean weight of its target. Neither divides by the weights of the batch.
    """
    logits_BC = logits_BC.float()
    if kind != "binary":
        return F.cross_entropy(logits_BC, targets_BC, weights_C)
    present_BC = targets_BC.gt(0.0).to(logits_BC.dtype)
    weights_B1 = None if weights_C is None else targets_BC @ weights_C[:, None]
    return F.binary_cross_entropy_with_logits(logits_BC, present_BC, weights_B1)
