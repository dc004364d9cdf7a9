"""Position embeddings: added to the tokens (learned, row + column, sin-cos) or used in attention (rotary, relative).

Shapes: B batch, H heads, N tokens (prefix and patches), G patches, D token width, K head width.
A grid is (rows, columns) of patches; prefix tokens (class, distillation, registers) are not on it.
`keep_BN` are the indices of the tokens that patch dropout kept; None: all.
"""

import torch
from torch import Tensor, nn

ROPE_BASE = 100.0
"""Slowest rotary wavelength over 2 pi, in patches: 100 as in Heo et al. 2024 (arXiv:2403.13298) for axial RoPE."""


def sincos_2d(grid: tuple[int, int], dim: int, base: float = 10_000.0, *, endpoint: bool = True) -> Tensor:
    """Return a fixed embedding [G, D]: 25% of channels each for sin and cos of column and row.

    `endpoint`: frequencies from 1 to 1 / base inclusive, as in big_vision; without it, as in MAE.
    """
    rows_G, columns_G = _coordinates(grid)
    last = (dim // 4 - 1 or 1) if endpoint else dim // 4
    frequency = base ** -(torch.arange(dim // 4, dtype=torch.float32) / last)
    x_GF, y_GF = columns_G[:, None] * frequency, rows_G[:, None] * frequency
    return torch.cat([x_GF.sin(), x_GF.cos(), y_GF.sin(), y_GF.cos()], dim=1)


class RowColumnEmbedding(nn.Module):
    """Learned in two dimensions: one vector per row plus one per column."""

    def __init__(self, grid: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(1, grid[0], dim))
        self.column = nn.Parameter(torch.zeros(1, grid[1], dim))

    def forward(self) -> Tensor:
        """Return the embedding of every patch, [1, G, D]."""
        return (self.row[:, :, None] + self.column[:, None, :]).flatten(1, 2)


class RotaryEmbedding(nn.Module):
    """Axial rotary embedding: half of the channels of a head rotate with the row, half with the column."""

    cos_NK: Tensor
    sin_NK: Tensor

    def __init__(self, grid: tuple[int, int], prefix: int, head_dim: int) -> None:
        super().__init__()
        frequency = ROPE_BASE ** -(torch.arange(head_dim // 4, dtype=torch.float32) / (head_dim // 4))
        angle_GF = torch.cat([c_G[:, None] * frequency for c_G in _coordinates(grid)], dim=1)
        # Prefix tokens have angle 0: they are not rotated.
        angle_NK = nn.functional.pad(angle_GF, (0, 0, prefix, 0)).repeat(1, 2)
        self.register_buffer("cos_NK", angle_NK.cos(), persistent=False)
        self.register_buffer("sin_NK", angle_NK.sin(), persistent=False)

    def forward(self, x_BHNK: Tensor, keep_BN: Tensor | None = None) -> Tensor:
        """Rotate queries or keys, of all tokens or the leading ones, by the angle of their position."""
        tokens = x_BHNK.shape[2]
        if keep_BN is None:
            cos, sin = self.cos_NK[:tokens], self.sin_NK[:tokens]
        else:
            cos, sin = (table_NK[keep_BN[:, :tokens]].unsqueeze(1) for table_NK in (self.cos_NK, self.sin_NK))
        first, second = x_BHNK.chunk(2, dim=-1)
        rotated_BHNK = torch.cat([-second, first], dim=-1)
        return (x_BHNK * cos + rotated_BHNK * sin).to(x_BHNK.dtype)


class RelativeBias(nn.Module):
    """A learned bias of the attention weights per head and offset between two patches (as in Swin, BEiT).

    Three more entries, shared by all prefix tokens: prefix to patch, patch to prefix, prefix to prefix.
    """

    relative_position_index: Tensor

    def __init__(self, grid: tuple[int, int], prefix: int, num_heads: int, *, all_pairs: bool = True) -> None:
        """`all_pairs`: keep the index of all pairs of tokens; otherwise every call passes one."""
        super().__init__()
        offsets = (2 * grid[0] - 1) * (2 * grid[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(offsets + (3 if prefix else 0), num_heads))
        if all_pairs:
            self.register_buffer("relative_position_index", relative_index(grid, prefix), persistent=False)

    def forward(self, keep_BN: Tensor | None = None, index_QN: Tensor | None = None) -> Tensor:
        """Return the bias to add to the attention scores before softmax, [1 or B, H, N, N].

        `index_QN`: of the pairs of tokens, as `relative_index_between` returns it; None: of all pairs.
        """
        if index_QN is not None:
            return self.relative_position_bias_table[index_QN].permute(2, 0, 1)[None]
        index_BNN = self.relative_position_index[None]
        if keep_BN is not None:
            index_BNN = self.relative_position_index[keep_BN[:, :, None], keep_BN[:, None, :]]
        return self.relative_position_bias_table[index_BNN].permute(0, 3, 1, 2)


def relative_index(grid: tuple[int, int], prefix: int) -> Tensor:
    """Return the row of the bias table per pair of tokens, [N, N]."""
    rows_G, columns_G = (c_G.long() for c_G in _coordinates(grid))
    down_GG = rows_G[:, None] - rows_G[None, :] + grid[0] - 1
    right_GG = columns_G[:, None] - columns_G[None, :] + grid[1] - 1
    index_NN = nn.functional.pad(down_GG * (2 * grid[1] - 1) + right_GG, (prefix, 0, prefix, 0))
    offsets = (2 * grid[0] - 1) * (2 * grid[1] - 1)
    index_NN[:prefix, prefix:] = offsets
    index_NN[prefix:, :prefix] = offsets + 1
    index_NN[:prefix, :prefix] = offsets + 2
    return index_NN


def relative_index_between(grid: tuple[int, int], prefix: int, queries_Q: Tensor, keys_N: Tensor) -> Tensor:
    """Return the row of the bias table per pair of these tokens, [Q, N]."""
    (down_Q, right_Q), (down_N, right_N) = (
        ((tokens - prefix) // grid[1], (tokens - prefix) % grid[1]) for tokens in (queries_Q, keys_N)
    )
    down_QN, right_QN = (q[:, None] - n[None, :] for q, n in ((down_Q, down_N), (right_Q, right_N)))
    index_QN = (down_QN + grid[0] - 1) * (2 * grid[1] - 1) + right_QN + grid[1] - 1
    offsets = (2 * grid[0] - 1) * (2 * grid[1] - 1)
    to_patch_Q1, of_prefix_N = (queries_Q >= prefix)[:, None], keys_N < prefix
    index_QN = torch.where(to_patch_Q1 & of_prefix_N, offsets + 1, index_QN)
    return torch.where(to_patch_Q1, index_QN, torch.where(of_prefix_N, offsets + 2, offsets))


def _coordinates(grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return row and column of every patch, each [G]."""
    rows, columns = (torch.arange(size, dtype=torch.float32) for size in grid)
    row_RC, column_RC = torch.meshgrid(rows, columns, indexing="ij")
    return row_RC.flatten(), column_RC.flatten()
