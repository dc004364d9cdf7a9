"""Losses on soft targets, always in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def classification_loss(kind: str, logits_BC: torch.Tensor, targets_BC: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over images. `targets_BC` are probabilities after mixing and label smoothing.

    `binary` is one binary decision per class, as in DeiT III: every class with a nonzero target is treated as present,
    and the mean is over classes too.
    """
    logits_BC = logits_BC.float()
    if kind == "binary":
        return F.binary_cross_entropy_with_logits(logits_BC, targets_BC.gt(0.0).to(logits_BC.dtype))
    return F.cross_entropy(logits_BC, targets_BC)
