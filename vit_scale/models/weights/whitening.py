"""Initialize the patch projection so that it whitens patches: fine detail weighs as much as coarse structure.

Neighboring pixels are similar, so a random projection of a patch contains little but its mean color, and learning the
rest takes a fraction of a short training run. The eigenvectors of the patch covariance, each divided by its standard
deviation, weigh all directions equally (as in the first layer of Keller Jordan's airbench for convolutional networks).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from vit_scale.errors import UserError
from vit_scale.models.weights.init import Editing

TOKEN_STD = 1.0
"""Standard deviation of token values, for patches like those that the projection was computed from."""
_FLOOR = 1e-2
"""Added to the variances: what is fainter than this is mostly JPEG noise."""


@torch.no_grad()
def whiten_patches(model: nn.Module, images_BCHW: Tensor, editing: Editing = nullcontext) -> None:
    """Set the patch projection of `model` to one that whitens the patches of these images, normalized as in training.

    Draws from torch's generator: a rotation mixes the whitened directions into the token width.
    """
    proj = getattr(getattr(model, "patch_embed", None), "proj", None)
    if not isinstance(proj, nn.Conv2d):
        raise UserError("model.init = 'whitened': the model has no plain patch projection")
    kernel = (proj.kernel_size[0], proj.kernel_size[1])
    patches_ND = unfold(images_BCHW, kernel, stride=kernel).transpose(1, 2).flatten(0, 1)
    variances, vectors = torch.linalg.eigh(patches_ND.T @ patches_ND / len(patches_ND))
    kept = min(proj.out_channels, len(variances))
    whitening = (vectors / (variances + _FLOOR).sqrt())[:, -kept:].T
    rotation, _ = torch.linalg.qr(torch.randn(proj.out_channels, kept))
    scale = TOKEN_STD * (proj.out_channels / kept) ** 0.5
    with editing(proj.weight) as weight:
        weight.copy_((scale * rotation @ whitening).view_as(weight))
