"""Attention within groups of patches: windows, dilated windows and bands of rows (models/layers/token_groups.py).

A patch attends to the prefix tokens and the patches of its group, in one softmax; a prefix token attends to all tokens.
Groups are batches of scaled_dot_product_attention: no mask, and no N x N matrix.

Shapes: B batch, N tokens (P prefix tokens, then patches), G groups, S patches per group, Q queries, D token width,
H heads, K head width.
"""

from typing import Any

import torch
from torch import Tensor

from vit_scale.errors import UserError
from vit_scale.models.attention import Attention
from vit_scale.models.layers.pos_embed import relative_index_between
from vit_scale.models.layers.token_groups import Grid, Grouping


class GroupedAttention(Attention):
    """Self-attention of patches within groups; with a single group it is full attention, bit for bit."""

    order_G: Tensor
    """Patches, group by group."""
    inverse_G: Tensor
    """Where `order_G` has each patch."""

    def __init__(self, dim: int, num_heads: int, *, grid: Grid, prefix: int, grouping: Grouping, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        self.grid, self.prefix, self.grouping = grid, prefix, grouping
        order_G, inverse_G = _orders(grouping, grid)
        self.register_buffer("order_G", order_G, persistent=False)
        self.register_buffer("inverse_G", inverse_G, persistent=False)

    def is_full(self, grid: Grid | None = None) -> bool:
        """Return whether all patches of this grid are in one group."""
        return self.grouping.is_one_group(grid or self.grid)

    def attend(
        self, q_BQD: Tensor, k_BND: Tensor, v_BND: Tensor, keep_BN: Tensor | None = None, grid: Grid | None = None
    ) -> Tensor:
        """Return the weighted mean of values per query, [B, Q, D]; the queries are all, or leading prefix tokens."""
        raise NotImplementedError

    def weights(self, x_BND: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the attention weights [B, H, N, N]: zero between groups; each row sums to one."""
        raise NotImplementedError


def _orders(grouping: Grouping, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the patches, group by group, and the inverse of that permutation."""
    order_G = torch.tensor([patch for groups in grouping.by_shape(grid) for group in groups for patch in group])
    return order_G, order_G.argsort()
