"""The two kinds of MLP in a block.

Shapes: B batch, N tokens, D token width, F hidden width.
"""

from torch import Tensor, nn

from vit_scale.models.layers.dropout import Dropout


class Mlp(nn.Module):
    """Two linear layers with GELU in between."""

    activation: type[nn.Module] = nn.GELU
    packed = 1
    """Matrices of the hidden width that `fc1` holds."""

    def __init__(self, dim: int, hidden: int, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, self.packed * hidden, bias=bias)
        self.act = self.activation()
        self.drop1 = Dropout(dropout) if dropout else nn.Identity()
        self.fc2 = nn.Linear(hidden, dim, bias=bias)
        self.drop2 = Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BND: Tensor) -> Tensor:
        """Apply the MLP to each token."""
        return self.drop2(self.fc2(self.drop1(self.activate(self.fc1(x_BND)))))

    def activate(self, hidden_BNF: Tensor) -> Tensor:
        """Apply the nonlinearity between the two linear layers."""
        return self.act(hidden_BNF)


class SwiGlu(Mlp):
    """Gated MLP (Shazeer 2020, arXiv:2002.05202); gate and value share one matrix, as in timm's SwiGLUPacked."""

    activation = nn.SiLU
    packed = 2

    def activate(self, hidden_BNF: Tensor) -> Tensor:
        """Multiply the value by the activated gate, which is the first half."""
        gate_BNF, value_BNF = hidden_BNF.chunk(2, dim=-1)
        return self.act(gate_BNF) * value_BNF
