"""Statistics of attention weights: pure functions of [B, H, N, N], of which each row sums to one.

Shapes: B images, H heads, N tokens (first the prefix tokens, then P patches), R rows and C columns of patches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def patch_distances(grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """Return the distances in pixels [P, P] between the centers of the patches of a grid (rows, columns)."""
    rows, columns = (torch.arange(count, dtype=torch.float32) * side for count, side in zip(grid, patch, strict=True))
    places_P2 = torch.cartesian_prod(rows, columns)
    return (places_P2[:, None] - places_P2[None]).square().sum(-1).sqrt()


def attention_distance(weights_BHNN: Tensor, distances_PP: Tensor) -> Tensor:
    """Return the mean distance [B, H] from a patch to what it attends to, in the unit of `distances_PP`.

    Prefix tokens have no place: they are neither queries nor keys, and each row is normalized without them. Rows that
    attend to prefix tokens only are left out; if all do, the distance is 0.
    """
    prefix = weights_BHNN.shape[-1] - len(distances_PP)
    patches_BHPP = weights_BHNN[..., prefix:, prefix:].float()
    total_BHP = patches_BHPP.sum(-1)
    has_place = total_BHP > 0
    distance_BHP = torch.where(has_place, (patches_BHPP * distances_PP).sum(-1) / total_BHP, 0.0)
    return distance_BHP.sum(-1) / has_place.sum(-1).clamp(min=1)


def normalized_entropy(weights_BHNN: Tensor) -> Tensor:
    """Return the mean entropy [B, H] of the rows, over ln N: 0 if each query has one key, 1 if all keys are equal."""
    entropy_BHN = torch.special.entr(weights_BHNN.float()).sum(-1)
    return entropy_BHN.mean(-1) / max(math.log(weights_BHNN.shape[-1]), 1e-12)


def prefix_share(weights_BHNN: Tensor, prefix: int) -> Tensor:
    """Return the fraction [B, H] of the attention of patches that prefix tokens receive."""
    return weights_BHNN[..., prefix:, :prefix].float().sum(-1).mean(-1)


def singular_values(weights_BHNN: Tensor) -> Tensor:
    """Return the singular values [B, H, N], largest first, on the CPU; NaN of weights that are not finite."""
    weights = weights_BHNN.float().cpu()  # A GPU computes one small matrix after the other, slower than the host.
    if not weights.isfinite().all():
        return weights.new_full(weights.shape[:-1], torch.nan)
    return torch.linalg.svdvals(weights)


def effective_rank(values_BHN: Tensor) -> Tensor:
    """Return exp of the entropy of the singular values, normalized to sum to one: from 1 to N."""
    return torch.special.entr(values_BHN / values_BHN.sum(-1, keepdim=True)).sum(-1).exp()


def head_similarity(weights_BHNN: Tensor) -> Tensor:
    """Return the cosine similarity [B, H, H] of the matrices of two heads: 1 if equal, 0 if they share no key."""
    flat = torch.nn.functional.normalize(weights_BHNN.float().flatten(2), dim=-1)
    return flat @ flat.mT


def rollout(blocks: Iterable[Tensor]) -> Tensor:
    """Return the attention rollout [B, N, N] (Abnar and Zuidema, 2020): how much of each token each output token has.

    The product, from the last block to the first, of half the mean over heads plus half the identity, which stands for
    the residual branch. `blocks` are weights [B, H, N, N], first block first; only one at a time is needed.
    """
    product = None
    for weights_BHNN in blocks:
        step = mixing_matrix(weights_BHNN)
        del weights_BHNN  # Not kept while the next block's are computed.
        product = step if product is None else step @ product
    assert product is not None, "a model has at least one block"
    return product


def mixing_matrix(weights_BHNN: Tensor) -> Tensor:
    """Return the matrix [B, N, N] by which rollout multiplies: half the mean over heads, half the identity."""
    mean_BNN = weights_BHNN.float().mean(1)
    return 0.5 * mean_BNN + 0.5 * torch.eye(mean_BNN.shape[-1], device=mean_BNN.device)
