"""LayerScale: a learned factor for each channel of a residual branch (Touvron et al. 2021, arXiv:2103.17239)."""

import torch
from torch import Tensor, nn


class LayerScale(nn.Module):
    """Multiplies channels by `gamma`, which starts small so that deep models start close to the identity."""

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), initial))

    def forward(self, x_BND: Tensor) -> Tensor:
        """Scale the last dimension."""
        return x_BND * self.gamma
