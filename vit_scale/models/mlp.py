"""The two kinds of MLP of a block.

Shapes: B batch, N tokens, D token width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from vit_scale.kernels.onednn import Linear, gelu
from vit_scale.models.dropout import Dropout


class Mlp(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, dim: int, hidden: int, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden, bias=bias)
        self.fc2 = Linear(hidden, dim, bias=bias)
        self.drop = Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BND: Tensor) -> Tensor:
        """Each token on its own."""
        return self.drop(self.fc2(self.drop(gelu(self.fc1(x_BND)))))


class SwiGlu(nn.Module):
    """Gated MLP (Shazeer 2020, arXiv:2002.05202); gate and value share one matrix, as in timm's SwiGLUPacked."""

    def __init__(self, dim: int, hidden: int, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = Linear(dim, 2 * hidden, bias=bias)
        self.fc2 = Linear(hidden, dim, bias=bias)
        self.drop = Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BND: Tensor) -> Tensor:
        """Each token on its own."""
        gate, value = self.fc1(x_BND).chunk(2, dim=-1)
        return self.drop(self.fc2(self.drop(F.silu(gate) * value)))
