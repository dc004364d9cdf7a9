"""uint8 images to normalised floats, on the device where the model is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vit_scale.config import DataConfig
from vit_scale.errors import UserError

Values = tuple[float, ...]

# Each entry: mean and standard deviation for red, green and blue in 0..1.
NORMALIZATIONS: dict[str, tuple[Values, Values]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "inception": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}


class Normalize(torch.nn.Module):
    """(x / 255 - mean) / std as one multiplication and one addition for each channel."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        mean_C, std_C = torch.tensor(mean), torch.tensor(std)
        self.register_buffer("scale", (1 / (255 * std_C)).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("shift", (-mean_C / std_C).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 [B, C, H, W] to float32 of the same shape, contiguous."""
        # In place, because on a CPU fresh memory costs more than the arithmetic.
        return images.to(torch.float32, memory_format=torch.contiguous_format).mul_(self.scale).add_(self.shift)


def resolve_normalization(config: DataConfig, model_name: str, in_chans: int) -> tuple[Values, Values]:
    """Mean and standard deviation for each channel, from values, a name, or the model's own (`auto`)."""
    mean, std = config.mean, config.std
    own = "cifar10" if "cifar" in model_name else "inception"
    resolved = []
    for key, value, part in (("mean", mean, 0), ("std", std, 1)):
        if isinstance(value, str):
            value = NORMALIZATIONS[own if value == "auto" else value][part]
            if in_chans != len(value):
                value = (sum(value) / len(value),) * in_chans
        if len(value) != in_chans:
            raise UserError(f"data.{key}={list(value)}: {len(value)} values for images of {in_chans} channels")
        resolved.append(tuple(value))
    return resolved[0], resolved[1]
