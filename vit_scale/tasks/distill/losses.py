"""Losses between a student and its teacher, always in fp32 and averaged over images.

With student logits s, teacher logits t and temperature T:

| kind       | loss                                                          |
| hard       | cross entropy of s with the class argmax t                    |
| soft, kl   | T^2 x KL(softmax(t / T) || softmax(s / T)), summed over classes |

The KL divergence is divided by the number of images, as in timm. DeiT's code divides by images x classes: its numbers
are smaller by the number of classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def distillation_loss(
    kind: str, student_BC: torch.Tensor, teacher_BC: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the loss of the student's logits against the teacher's."""
    student_BC, teacher_BC = student_BC.float(), teacher_BC.float()
    if kind == "hard":
        return F.cross_entropy(student_BC, teacher_BC.argmax(1))
    log_p_BC, log_q_BC = (F.log_softmax(logits_BC / temperature, dim=1) for logits_BC in (teacher_BC, student_BC))
    return temperature**2 * F.kl_div(log_q_BC, log_p_BC, reduction="batchmean", log_target=True)


def feature_loss(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error of projected student tokens [B, G, D] against normalized teacher tokens.

    Each teacher token is normalized to mean 0 and variance 1: the scale of tokens differs between models and grows with
    depth. The mean is over pairs of blocks, images, tokens and dimensions.
    """
    losses = [
        F.mse_loss(ours_BGD.float(), F.layer_norm(theirs_BGD.float(), theirs_BGD.shape[-1:]))
        for ours_BGD, theirs_BGD in zip(student, teacher, strict=True)
    ]
    return torch.stack(losses).mean()
