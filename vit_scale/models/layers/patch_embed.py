"""Images to patch tokens.

Shapes: B batch, C channels, H W pixels, G patches (grid height x grid width), D token width.
"""

from torch import Tensor, nn

from vit_scale.errors import UserError


class PatchEmbed(nn.Module):
    """One linear map applied to every patch: a convolution whose stride is its kernel size."""

    def __init__(self, img_size: tuple[int, int], patch_size: tuple[int, int], in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.img_size = img_size
        self.any_size = False
        """Accept images of any size that patches divide, not only `img_size`."""
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return tokens [B, G, D], row by row."""
        expected = (self.proj.in_channels, *self.img_size)
        if x_BCHW.shape[1:] != expected and not self._fits(x_BCHW):
            raise UserError(
                f"The model expects images of {expected} (channels, height, width), not {tuple(x_BCHW.shape[1:])}; "
                "set model.img_size and model.in_chans."
            )
        return self.proj(x_BCHW).flatten(2).transpose(1, 2)

    def _fits(self, x_BCHW: Tensor) -> bool:
        rows, columns = self.proj.stride
        whole = x_BCHW.shape[2] % rows == 0 and x_BCHW.shape[3] % columns == 0
        return self.any_size and whole and x_BCHW.shape[1] == self.proj.in_channels
