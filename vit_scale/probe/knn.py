"""k-nearest-neighbor classification by cosine similarity.

The k most similar training images vote for their class with weights softmax(similarity / 0.07), as in InstDisc, MoCo
and DINO. Shapes: N training images, Q queries, D features, K neighbors, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_scale.errors import UserError

NEIGHBORS = (10, 20, 100, 200)
TEMPERATURE = 0.07
QUERY_BLOCK, TRAIN_BLOCK = 1024, 16384
"""Rows and columns of the similarities that are in memory at a time."""
_VOTES = 2**24
"""Most votes (queries x classes) that are in memory at a time."""


def usable_neighbors(ks: Sequence[int] | None, available: int) -> tuple[list[int], list[int]]:
    """Return which k to use and which of the default ones are skipped; a requested one that is too large is an error.

    `available`: the neighbors that an image has.
    """
    usable = [k for k in ks or NEIGHBORS if k <= available]
    skipped = [k for k in ks or NEIGHBORS if k > available]
    if ks and skipped:
        raise UserError(f"--k {skipped[0]}: an image has only {available:,} other training images")
    if not usable:
        raise UserError(f"k-NN needs at least {skipped[0]} training images, there are {available:,}; choose a --k")
    return usable, skipped


def knn_predict(
    train_ND: Tensor,
    labels_N: Tensor,
    queries_QD: Tensor,
    ks: Sequence[int],
    num_classes: int,
    *,
    own_Q: Tensor | None = None,
    device: torch.device | str = "cpu",
    advance: Callable[[], None] = lambda: None,
) -> dict[int, Tensor]:
    """Return the predicted class of each query for each k.

    `own_Q`: row of `train_ND` that is the query itself, which is never its neighbor; -1: none. `advance` is called
    after each block of queries. Memory does not grow with N x Q.
    """
    most, found = max(ks), []
    train = _Directions.of(train_ND)
    for start, stop in query_blocks(len(queries_QD), num_classes):
        query_QD = train.centered(queries_QD[start:stop]).to(device)
        own = None if own_Q is None else own_Q[start:stop].to(device)
        similarity_QK, neighbor_QK = _nearest(query_QD, train, most, own)
        # On a CPU: sums of votes on a GPU depend on their order.
        found.append(_vote(similarity_QK.cpu(), labels_N[neighbor_QK.cpu()], ks, num_classes))
        advance()
    return {k: torch.cat([each[k] for each in found]) for k in ks}


def query_blocks(queries: int, num_classes: int) -> list[tuple[int, int]]:
    """Return start and end of each block of queries."""
    size = max(1, min(QUERY_BLOCK, _VOTES // num_classes))
    return [(start, min(start + size, queries)) for start in range(0, queries, size)]


@dataclass(frozen=True)
class _Directions:
    """Training features of length 1, minus their mean m.

    For features x and q of length 1, x.q = (x - m).(q - m) + (x - m).m + q.m, and the last term is the same for all
    neighbors of q. Without it float32 also ranks features that differ little from one another, as those of a model that
    has hardly learned: their similarities are all 1 up to rounding.
    """

    mean_D: Tensor
    rows_ND: Tensor
    offset_N: Tensor

    @classmethod
    def of(cls, train_ND: Tensor) -> _Directions:
        """Normalize training features."""
        sums = [F.normalize(part.double(), dim=1).sum(0) for part in train_ND.split(TRAIN_BLOCK)]
        mean = torch.stack(sums).sum(0) / len(train_ND)
        parts = [F.normalize(part.double(), dim=1) - mean for part in train_ND.split(TRAIN_BLOCK)]
        return cls(
            mean, torch.cat([part.float() for part in parts]), torch.cat([(part @ mean).float() for part in parts])
        )

    def centered(self, rows: Tensor) -> Tensor:
        """Return other features of length 1, minus the mean of the training features."""
        return (F.normalize(rows.double(), dim=1) - self.mean_D).float()


def _nearest(query_QD: Tensor, train: _Directions, most: int, own_Q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the similarities, up to a constant, and rows of the `most` nearest training images, nearest first."""
    best_QK = query_QD.new_empty(len(query_QD), 0)
    rows_QK = torch.empty(len(query_QD), 0, dtype=torch.int64, device=query_QD.device)
    for start in range(0, len(train.rows_ND), TRAIN_BLOCK):
        train_BD, offset_B = (
            t[start : start + TRAIN_BLOCK].to(query_QD.device) for t in (train.rows_ND, train.offset_N)
        )
        similarity_QB = query_QD @ train_BD.T + offset_B
        if own_Q is not None:
            place = own_Q - start
            mine = (place >= 0) & (place < len(train_BD))
            similarity_QB[mine, place[mine]] = -torch.inf
        best_QB, columns_QB = similarity_QB.topk(min(most, len(train_BD)), dim=1)
        merged = torch.cat([best_QK, best_QB], dim=1)
        best_QK, order = merged.topk(min(most, merged.shape[1]), dim=1)
        rows_QK = torch.cat([rows_QK, columns_QB + start], dim=1).gather(1, order)
    return best_QK, rows_QK


def _vote(similarity_QK: Tensor, label_QK: Tensor, ks: Sequence[int], num_classes: int) -> dict[int, Tensor]:
    # All weights of a query divided by their largest: the class with most votes does not depend on the softmax's sum.
    weight_QK = ((similarity_QK - similarity_QK[:, :1]).double() / TEMPERATURE).exp()
    predicted = {}
    for k in ks:
        votes_QC = weight_QK.new_zeros(len(weight_QK), num_classes)
        votes_QC.scatter_add_(1, label_QK[:, :k], weight_QK[:, :k])
        predicted[k] = votes_QC.argmax(1)
    return predicted
