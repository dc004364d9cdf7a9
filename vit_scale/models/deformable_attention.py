"""Multi-scale deformable attention (Zhu et al. 2021, arXiv:2010.04159): each query reads a few points of every level.

A level is a feature map; the tokens of all levels are concatenated. Its cost grows with queries x points, not with
queries x tokens. Names of parameters are those of Deformable DETR.

Shapes: B batch, Q queries, N tokens of all levels, D token width, H heads, K head width (D = H K), L levels,
P points per head and level, 2 or 4 coordinates: (x, y) or (x, y, width, height), as fractions of the image.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.init import xavier_uniform_, zeros_

from vit_scale import gpu

Size = tuple[int, int]
"""Rows and columns of a level."""


class DeformableAttention(nn.Module):
    """Attention whose locations and weights are linear functions of the query; there are no keys."""

    def __init__(self, dim: int, num_heads: int, *, num_levels: int, num_points: int = 4) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim = {dim} is not divisible by num_heads = {num_heads}")
        self.num_heads, self.num_levels, self.num_points = num_heads, num_levels, num_points
        self.sampling_offsets = nn.Linear(dim, num_heads * num_levels * num_points * 2)
        self.attention_weights = nn.Linear(dim, num_heads * num_levels * num_points)
        self.value_proj = nn.Linear(dim, dim)
        self.output_proj = nn.Linear(dim, dim)
        self.init_weights()

    def forward(
        self,
        x_BQD: Tensor,
        reference_BQLC: Tensor,
        tokens_BND: Tensor,
        sizes: Sequence[Size],
        valid_BN: Tensor | None = None,
    ) -> Tensor:
        """Return what each query reads around its reference, [B, Q, D].

        `x_BQD`: queries, with their positions added. `reference_BQLC`: a point (x, y) or a box (x, y, width, height)
        per query and level, as fractions of the level. `sizes`: rows and columns per level, in the order of the tokens.
        `valid_BN`: False for padding, which reads as zeros like everything outside of a level.
        """
        value_BND = self.value_proj(tokens_BND)
        if valid_BN is not None:
            value_BND = value_BND.masked_fill(~valid_BN[..., None], 0.0)
        value_BNHK = value_BND.unflatten(-1, (self.num_heads, -1))
        y_BQD = read_points(value_BNHK, sizes, self.locations(x_BQD, reference_BQLC, sizes), self.weights(x_BQD))
        return self.output_proj(y_BQD)

    def locations(self, x_BQD: Tensor, reference_BQLC: Tensor, sizes: Sequence[Size]) -> Tensor:
        """Return the points that each query reads, [B, Q, H, L, P, 2], as (x, y) fractions of the level.

        Offsets are in tokens of the level around a point, and in halves of a box divided by P around a box: the initial
        points of a head then lie on a line from the center to the edge of the box.
        """
        offsets_BQHLP2 = self.sampling_offsets(x_BQD).unflatten(-1, (self.num_heads, self.num_levels, -1, 2))
        center_BQ1L12 = reference_BQLC[:, :, None, :, None, :2]
        if reference_BQLC.shape[-1] == 2:
            widths_L12 = torch.tensor([(columns, rows) for rows, columns in sizes], dtype=center_BQ1L12.dtype)[:, None]
            return center_BQ1L12 + offsets_BQHLP2 / gpu.upload(widths_L12, center_BQ1L12.device)
        half_box_BQ1L12 = reference_BQLC[:, :, None, :, None, 2:] / 2
        return center_BQ1L12 + offsets_BQHLP2 / self.num_points * half_box_BQ1L12

    def weights(self, x_BQD: Tensor) -> Tensor:
        """Return the weight of each point, [B, Q, H, L, P]; those of a query and head sum to one."""
        scores_BQHS = self.attention_weights(x_BQD).unflatten(-1, (self.num_heads, -1))
        return scores_BQHS.softmax(dim=-1).unflatten(-1, (self.num_levels, self.num_points))

    def init_weights(self, editing: Callable[[Tensor], AbstractContextManager[Tensor]] = nullcontext) -> None:
        """Initialize as in the paper: head h reads 1 to P tokens away in direction h, with equal weights.

        `editing`: see `models.weights.init`.
        """
        for layer in (self.sampling_offsets, self.attention_weights, self.value_proj, self.output_proj):
            with editing(layer.weight) as weight:
                xavier_uniform_(weight) if layer in (self.value_proj, self.output_proj) else zeros_(weight)
            with editing(layer.bias) as bias:
                zeros_(bias)
        with editing(self.sampling_offsets.bias) as bias, torch.no_grad():
            bias.copy_(self._initial_offsets().flatten())

    def _initial_offsets(self) -> Tensor:
        """Return [H, L, P, 2]: directions spread over the circle, scaled to a square of tokens."""
        angle_H = torch.arange(self.num_heads) * (2 * math.pi / self.num_heads)
        direction_H2 = torch.stack([angle_H.cos(), angle_H.sin()], dim=-1)
        direction_H2 = direction_H2 / direction_H2.abs().amax(dim=-1, keepdim=True)
        steps_P1 = torch.arange(1, self.num_points + 1)[:, None]
        return (direction_H2[:, None, None] * steps_P1).expand(-1, self.num_levels, -1, -1)


def read_points(value_BNHK: Tensor, sizes: Sequence[Size], locations_BQHLP2: Tensor, weights_BQHLP: Tensor) -> Tensor:
    """Return the weighted mean of the values at each query's points, bilinear between tokens, [B, Q, D]."""
    batch, queries, heads = locations_BQHLP2.shape[:3]
    # In the precision of the locations: half precision cannot address single tokens of a large level.
    value_BNHK = value_BNHK.to(locations_BQHLP2.dtype)
    y_XKQ: Tensor | float = 0.0  # X = B H
    levels = value_BNHK.split([rows * columns for rows, columns in sizes], dim=1)
    for level, (value_BGHK, size) in enumerate(zip(levels, sizes, strict=True)):
        map_XKRC = value_BGHK.permute(0, 2, 3, 1).flatten(0, 1).unflatten(-1, size)
        points_XQP2 = 2 * locations_BQHLP2[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        read_XKQP = F.grid_sample(map_XKRC, points_XQP2, padding_mode="zeros", align_corners=False)
        weights_X1QP = weights_BQHLP[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]
        y_XKQ = y_XKQ + (read_XKQP * weights_X1QP).sum(-1)
    assert isinstance(y_XKQ, Tensor)
    return y_XKQ.view(batch, heads, -1, queries).permute(0, 3, 1, 2).flatten(2).to(weights_BQHLP.dtype)
