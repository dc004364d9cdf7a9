"""A start for the patch projection that sees as much of every detail as of the coarse: whitened patches.

Neighbouring pixels are alike, so a random projection of a patch tells little but its mean colour, and learning the rest
takes a share of a short training. The eigenvectors of the patches' covariance, each divided by its deviation, tell all
directions apart equally (as in the first layer of Keller Jordan's airbench for convolutional networks).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from vit_scale.errors import UserError
from vit_scale.models.weights.init import Editing

TOKEN_STD = 1.0
"""Standard deviation of a token's numbers, of patches like those that the projection was made from."""
_FLOOR = 1e-2
"""Added to the variances: what is fainter than this is noise of JPEG files more than picture."""


@torch.no_grad()
def whiten_patches(model: nn.Module, images_BCHW: Tensor, editing: Editing = nullcontext) -> None:
    """Set the patch projection of `model` to one that whitens the patches of these images, normalised as in training.

    Draws from torch's generator: a rotation mixes the whitened directions into the width of a token.
    """
    proj = getattr(getattr(model, "patch_embed", None), "proj", None)
    if not isinstance(proj, nn.Conv2d):
        raise UserError("model.init = 'whitened': the model has no patch projection of the plain kind")
    kernel = (proj.kernel_size[0], proj.kernel_size[1])
    patches_ND = unfold(images_BCHW, kernel, stride=kernel).transpose(1, 2).flatten(0, 1)
    variances, vectors = torch.linalg.eigh(patches_ND.T @ patches_ND / len(patches_ND))
    kept = min(proj.out_channels, len(variances))
    whitening = (vectors / (variances + _FLOOR).sqrt())[:, -kept:].T
    rotation, _ = torch.linalg.qr(torch.randn(proj.out_channels, kept))
    scale = TOKEN_STD * (proj.out_channels / kept) ** 0.5
    with editing(proj.weight) as weight:
        weight.copy_((scale * rotation @ whitening).view_as(weight))
