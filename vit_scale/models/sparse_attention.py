"""Attention within groups of patches: windows, dilated windows and bands of rows (models/layers/token_groups.py).

A patch attends to the prefix tokens and the patches of its group, in one softmax; a prefix token attends to all tokens.
Groups are batches of scaled_dot_product_attention, so there is neither a mask nor an N x N matrix. On a CPU
kernels/fast_block.py computes the same without copies.

Shapes: B batch, N tokens (P prefix tokens, then patches), G groups, S patches per group, Q queries, D token width,
H heads, K head width.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from vit_scale.errors import UserError
from vit_scale.kernels import flex
from vit_scale.kernels.cpu_attention import Groups, groups_of
from vit_scale.models.attention import Attention, softmax_weights
from vit_scale.models.layers.pos_embed import relative_index_between
from vit_scale.models.layers.token_groups import Grid, Grouping, Run


class GroupedAttention(Attention):
    """Self-attention of patches within groups; with a single group it is full attention, bit for bit."""

    inverse: Tensor
    """Where the sequence of all groups has each patch."""

    def __init__(
        self, dim: int, num_heads: int, *, grid: Grid, prefix: int, grouping: Grouping, **options: Any
    ) -> None:
        super().__init__(dim, num_heads, **options)
        self.grid, self.prefix, self.grouping = grid, prefix, grouping
        indices_GS, inverse = group_indices(grouping, grid)
        self.num_shapes = len(indices_GS)
        for number, index_GS in enumerate(indices_GS):
            self.register_buffer(f"index_{number}", index_GS, persistent=False)
        self.register_buffer("inverse", inverse, persistent=False)

    def groups(self, grid: Grid | None = None) -> Groups | None:
        """Return the groups of patches of this grid; None: there is only one."""
        grid = grid or self.grid
        return None if self.grouping.is_one_group(grid) else _kernel_groups(self.grouping, grid, self.prefix)

    def attend(
        self, q_BQD: Tensor, k_BND: Tensor, v_BND: Tensor, keep_BN: Tensor | None = None, grid: Grid | None = None
    ) -> Tensor:
        """Return the weighted mean of values per query, [B, Q, D]; the queries are all, or leading prefix tokens."""
        grid = grid or self.grid
        self._check(grid, keep_BN)
        if self.grouping.is_one_group(grid):
            return super().attend(q_BQD, k_BND, v_BND, keep_BN)
        q_BHQK, k_BHNK, v_BHNK = self._heads_of(q_BQD, k_BND, v_BND, None)
        if q_BHQK.shape[2] <= self.prefix:
            return self._attend_to_all(q_BHQK, k_BHNK, v_BHNK, grid)
        indices_GS, inverse = self._indices(grid, q_BQD.device)
        if self.kernel == "flex":
            return flex.attend(q_BHQK, k_BHNK, v_BHNK, indices_GS, inverse, self.prefix)
        found = [self._attend_in_groups(q_BHQK, k_BHNK, v_BHNK, index_GS, grid) for index_GS in indices_GS]
        patches_BGD = torch.cat(found, dim=1).index_select(1, inverse)
        if not self.prefix:
            return patches_BGD
        prefix_BPD = self._attend_to_all(q_BHQK[:, :, : self.prefix], k_BHNK, v_BHNK, grid)
        return torch.cat([prefix_BPD, patches_BGD], dim=1)

    def weights(self, x_BND: Tensor, grid: Grid | None = None) -> Tensor:
        """Return the attention weights [B, H, N, N]: zero between groups; each row sums to one."""
        grid = grid or self.grid
        self._check(grid, None)
        q_BHNK, k_BHNK, _ = self._heads_of(*self.split(self.qkv(x_BND)), None)
        tokens_N = torch.arange(x_BND.shape[1], device=x_BND.device)
        mask_NN = torch.zeros(len(tokens_N), len(tokens_N), device=x_BND.device, dtype=q_BHNK.dtype)
        mask_NN.masked_fill_(~may_attend(self.grouping, grid, self.prefix, x_BND.device), float("-inf"))
        bias = self._bias_between(tokens_N, tokens_N, grid, q_BHNK.dtype)
        return softmax_weights(q_BHNK, k_BHNK, mask_NN if bias is None else mask_NN + bias)

    def _check(self, grid: Grid, keep_BN: Tensor | None) -> None:
        if keep_BN is not None and not self.grouping.is_one_group(grid):
            raise UserError("attention in groups of patches needs every patch: drop none, or set model.attention=full.")
        if grid != self.grid and not self.grouping.fits(grid):
            raise UserError(
                f"model.attention: groups of patches do not divide the {grid[0]} x {grid[1]} patches of this image; "
                "use another image size, model.window or model.dilation."
            )

    def _attend_to_all(self, q_BHQK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, grid: Grid) -> Tensor:
        """Let leading tokens attend to all, [B, Q, D]."""
        queries_Q, tokens_N = (torch.arange(t.shape[2], device=t.device) for t in (q_BHQK, k_BHNK))
        bias = self._bias_between(queries_Q, tokens_N, grid, q_BHQK.dtype)
        return self._softmax_attention(q_BHQK, k_BHNK, v_BHNK, bias).transpose(1, 2).flatten(2)

    def _attend_in_groups(self, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, index_GS: Tensor, grid: Grid) -> Tensor:
        """Return the results of the groups of one shape, group by group, [B, G S, D]."""
        tokens_GS = index_GS + self.prefix
        q, k, v = (
            _grouped(x_BHNK, tokens_GS, prefix)
            for x_BHNK, prefix in ((q_BHNK, 0), (k_BHNK, self.prefix), (v_BHNK, self.prefix))
        )
        # Groups of one shape are copies of each other, moved: they share the bias of the first.
        keys = torch.cat([torch.arange(self.prefix, device=tokens_GS.device), tokens_GS[0]])
        y = self._softmax_attention(q, k, v, self._bias_between(tokens_GS[0], keys, grid, q.dtype))
        return y.transpose(1, 2).reshape(q_BHNK.shape[0], index_GS.numel(), -1)

    def _bias_between(self, queries_Q: Tensor, keys_N: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor | None:
        if self.rel_pos is None:
            return None
        index_QN = relative_index_between(grid, self.prefix, queries_Q, keys_N)
        return self.rel_pos(None, index_QN).to(dtype)

    def _indices(self, grid: Grid, device: torch.device) -> tuple[list[Tensor], Tensor]:
        if grid == self.grid:
            return [getattr(self, f"index_{number}") for number in range(self.num_shapes)], self.inverse
        return group_indices(self.grouping, grid, device)


def group_indices(grouping: Grouping, grid: Grid, device: torch.device | None = None) -> tuple[list[Tensor], Tensor]:
    """Return the patches of each group, [G, S] for each shape of groups, and where their sequence has each patch."""
    # Computed on the device: a copy from the host would wait for it.
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    rows, columns = ([(run.size, _coordinates(run, device)) for run in runs] for runs in grouping.runs(grid))
    for height, rows_GS in rows:
        for width, columns_GS in columns:
            index = rows_GS[:, None, :, None] * grid[1] + columns_GS[None, :, None, :]
            by_shape.setdefault((height, width), []).append(index.flatten(2).flatten(0, 1))
    indices_GS = [torch.cat(parts) for parts in by_shape.values()]
    return indices_GS, torch.cat([index_GS.flatten() for index_GS in indices_GS]).argsort()


def _coordinates(run: Run, device: torch.device | None) -> Tensor:
    """Return the coordinates of each group, [G, S]."""
    line = torch.arange(run.start, run.start + run.groups * run.size, device=device)
    return line.view(-1, run.size, run.dilation).transpose(1, 2).flatten(0, 1)


def may_attend(grouping: Grouping, grid: Grid, prefix: int, device: torch.device | str = "cpu") -> Tensor:
    """Return whether a token (row) attends to another (column), [N, N]; for looking at attention, not for training."""
    group_N = torch.full((prefix + grid[0] * grid[1],), -1, device=device)
    for number, group in enumerate(grouping.groups(grid)):
        group_N[torch.tensor(group, device=device) + prefix] = number
    is_prefix_N = group_N < 0
    return (group_N[:, None] == group_N) | is_prefix_N[:, None] | is_prefix_N


def _grouped(x_BHNK: Tensor, tokens_GS: Tensor, prefix: int) -> Tensor:
    """Return heads per image and group, [B G, H, P + S, K]: the prefix tokens, then those of the group."""
    groups, size = tokens_GS.shape
    x_BNHK = x_BHNK.transpose(1, 2)
    x_BGSHK = x_BNHK.index_select(1, tokens_GS.flatten()).unflatten(1, (groups, size))
    if prefix:
        x_BGPHK = x_BNHK[:, None, :prefix].expand(-1, groups, -1, -1, -1)
        x_BGSHK = torch.cat([x_BGPHK, x_BGSHK], dim=2)
    return x_BGSHK.flatten(0, 1).transpose(1, 2)


@functools.lru_cache(maxsize=64)
def _kernel_groups(grouping: Grouping, grid: Grid, prefix: int) -> Groups:
    return groups_of(grouping.groups(grid), prefix)
