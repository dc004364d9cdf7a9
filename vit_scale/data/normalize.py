"""Normalize uint8 images on the model's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vit_scale.config import DataConfig
from vit_scale.errors import UserError
from vit_scale.models.variants import PIXEL_STATISTICS, pixel_statistics

Values = tuple[float, ...]

_CACHED_VALUES = 200_000

# Mean and standard deviation of red, green and blue, in 0..1.
NORMALIZATIONS: dict[str, tuple[Values, Values]] = {
    **PIXEL_STATISTICS,
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}


class Normalize(torch.nn.Module):
    """(x / 255 - mean) / std as one multiplication and one addition per channel."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, reuse: bool = False):
        """`reuse`: on a CPU each result overwrites the last of its shape, for fresh pages cost more than the sums."""
        super().__init__()
        self._reused: torch.Tensor | None = torch.empty(0) if reuse else None
        mean_C, std_C = torch.tensor(mean), torch.tensor(std)
        self.register_buffer("scale", 1 / (255 * std_C), persistent=False)
        self.register_buffer("shift", -mean_C / std_C, persistent=False)
        self._factors = self.scale.tolist()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Convert uint8 [B, C, H, W] to float32 of the same shape."""
        out = self._memory(images)
        if images.device.type != "cpu":
            return out.copy_(images).mul_(self.scale[:, None, None]).add_(self.shift[:, None, None])
        # A few images at a time, so that they stay in the CPU cache from the first operation to the last.
        few = max(1, _CACHED_VALUES // images[0].numel())
        for part_BCHW, out_BCHW in zip(images.split(few), out.split(few), strict=True):
            out_BCHW.copy_(part_BCHW)
            for out_BHW, factor, shift in zip(out_BCHW.unbind(1), self._factors, self.shift, strict=True):
                torch.add(shift, out_BHW, alpha=factor, out=out_BHW)
        return out

    def _memory(self, images: torch.Tensor) -> torch.Tensor:
        if self._reused is None or images.device.type != "cpu":
            return torch.empty(images.shape, dtype=torch.float32, device=images.device)
        if self._reused.shape != images.shape:
            self._reused = torch.empty(images.shape)
        return self._reused


def resolve_normalization(config: DataConfig, model_name: str, in_chans: int) -> tuple[Values, Values]:
    """Return mean and standard deviation per channel: given values, named ones, or the model's own (`auto`).

    Named values have three channels; images with another number of channels get their average.
    """
    own = pixel_statistics(model_name)
    mean = _resolve(config.mean, "mean", own[0], in_chans)
    return mean, _resolve(config.std, "std", own[1], in_chans)


def _resolve(value: Values | str, key: str, own: Values, in_chans: int) -> Values:
    if not isinstance(value, str):
        if len(value) != in_chans:
            raise UserError(f"data.{key}={list(value)}: {len(value)} values, but images have {in_chans} channels")
        return tuple(value)
    named = own if value == "auto" else NORMALIZATIONS[value][("mean", "std").index(key)]
    return named if len(named) == in_chans else (sum(named) / len(named),) * in_chans
