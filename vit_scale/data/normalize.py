"""uint8 images to normalised floats, on the device where the model is."""

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
    """(x / 255 - mean) / std as one multiplication and one addition for each channel."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        mean_C, std_C = torch.tensor(mean), torch.tensor(std)
        self.register_buffer("scale", 1 / (255 * std_C), persistent=False)
        self.register_buffer("shift", -mean_C / std_C, persistent=False)
        self._factors = self.scale.tolist()

    def forward(self, images: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return uint8 [B, C, H, W] as normalized float32 of the same shape, written to `out` if given."""
        out = torch.empty(images.shape, dtype=torch.float32, device=images.device) if out is None else out
        if images.device.type != "cpu":
            return out.copy_(images).mul_(self.scale[:, None, None]).add_(self.shift[:, None, None])
        # A few images at a time, so that they stay in the processor's cache from the first operation to the last.
        few = max(1, _CACHED_VALUES // images[0].numel())
        for part_BCHW, out_BCHW in zip(images.split(few), out.split(few), strict=True):
            out_BCHW.copy_(part_BCHW)
            for out_BHW, factor, shift in zip(out_BCHW.unbind(1), self._factors, self.shift, strict=True):
                torch.add(shift, out_BHW, alpha=factor, out=out_BHW)
        return out


def buffer_for(images: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor | None:
    """Return an `out=` for these images: `buffer` if its shape fits, otherwise a new one; None on a GPU.

    On a CPU the first use of new memory takes longer than normalizing the images.
    """
    if images.device.type != "cpu":
        return None
    return buffer if buffer is not None and buffer.shape == images.shape else torch.empty(images.shape)


def resolve_normalization(config: DataConfig, model_name: str, in_chans: int) -> tuple[Values, Values]:
    """Mean and standard deviation for each channel: values, or those of a name, or the model's own (`auto`).

    Three channels' worth of a name become their average where images have another number of channels.
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
