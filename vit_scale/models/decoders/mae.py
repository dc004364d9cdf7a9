"""The model of a masked autoencoder (He et al. 2021, arXiv:2111.06377): an encoder of few patches, a decoder of all.

Shapes: B batch, C channels, H W pixels, G patches, K kept patches, N tokens (prefix and patches), D token width,
P numbers in a patch.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from vit_scale import kernels
from vit_scale.kernels.watch import remember_types
from vit_scale.models.attention import NORM_EPS, Kernel
from vit_scale.models.block import Block, is_recomputed, run_block
from vit_scale.models.composite import Composite
from vit_scale.models.layers.pos_embed import sincos_2d
from vit_scale.models.variants import Variant
from vit_scale.models.weights.resample import Grid, resample_positions


def decoder_variant(encoder: Variant, *, dim: int, depth: int, heads: int) -> Variant:
    """Return the shapes of the decoder of an encoder: its blocks, and `num_classes` numbers per patch."""
    return Variant(
        img_size=encoder.img_size,
        patch_size=encoder.patch_size,
        in_chans=encoder.in_chans,
        num_classes=encoder.in_chans * encoder.patch_size[0] * encoder.patch_size[1],
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
        pos_embed="sincos",
        pool="tokens",
        fc_norm=False,
        class_token=encoder.class_token,
        registers=encoder.registers,
    )


class MaeDecoder(nn.Module):
    """A ViT of all patches, of which those that the encoder did not compute are one learned token at their position."""

    pos_1GD: Tensor

    def __init__(self, variant: Variant, encoder_dim: int, mask_ratio: float, *, kernel: Kernel = "auto") -> None:
        super().__init__()
        self.variant, self.encoder_dim, self.mask_ratio = variant, encoder_dim, mask_ratio
        self.img_size, self.in_chans = variant.img_size, variant.in_chans
        self.kernel = kernel
        self.activation_checkpointing: Literal["none", "selective", "full"] = "none"
        dim = variant.embed_dim
        self.embed = nn.Linear(encoder_dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        # Prefix tokens have no position.
        self.register_buffer("pos_1GD", sincos_2d(variant.grid, dim, endpoint=False)[None], persistent=False)
        self.blocks = nn.ModuleList(Block(variant, kernel=kernel) for _ in range(variant.depth))
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.pred = nn.Linear(dim, variant.num_classes)
        remember_types(self)

    def forward(self, x_BND: Tensor, keep_BK: Tensor, grid: Grid) -> Tensor:
        """Map the tokens of the encoder to the pixels of every patch, [B, G, P].

        `keep_BK`: indices of the patches that the encoder computed; `grid`: rows and columns of patches of the image.
        """
        shortcut = kernels.choose(self)
        x_BND = self.embed(x_BND)
        prefix = x_BND.shape[1] - keep_BK.shape[1]
        x_BGD = self._with_mask_tokens(x_BND[:, prefix:], keep_BK, grid[0] * grid[1]) + self._positions(grid)
        x_BND = torch.cat([x_BND[:, :prefix], x_BGD], dim=1)
        for index, block in enumerate(self.blocks):
            recompute = is_recomputed(index, self.activation_checkpointing)
            x_BND = run_block(block, x_BND, None, shortcut, recompute=recompute)
        return self.pred(self.norm(x_BND[:, prefix:]))

    def _with_mask_tokens(self, x_BKD: Tensor, keep_BK: Tensor, patches: int) -> Tensor:
        """Return all patches in their order, [B, G, D]."""
        batch, _, dim = x_BKD.shape
        masked_BGD = self.mask_token.expand(batch, patches, dim)
        # Under autocast the kept tokens are in half precision, the residual stream is not.
        return masked_BGD.scatter(1, keep_BK.unsqueeze(-1).expand(-1, -1, dim), x_BKD.to(masked_BGD.dtype))

    def _positions(self, grid: Grid) -> Tensor:
        own = self.variant.grid
        return self.pos_1GD if grid == own else resample_positions(self.pos_1GD, own, grid)


class MaskedAutoencoder(Composite):
    """An encoder, whose output is all of its tokens (`model.pool=tokens`), and a decoder."""

    def __init__(self, backbone: nn.Module, decoder: MaeDecoder) -> None:
        super().__init__(backbone)
        self.decoder = decoder

    def forward(self, x_BCHW: Tensor, keep_BK: Tensor) -> Tensor:
        """Return the predicted pixels of every patch, [B, G, P], from the patches of the indices `keep_BK`."""
        rows, columns = self.decoder.variant.patch_size
        grid = x_BCHW.shape[2] // rows, x_BCHW.shape[3] // columns
        return self.decoder(self.backbone(x_BCHW, keep_BK), keep_BK, grid)

    def no_weight_decay(self) -> set[str]:
        """Return the encoder's parameters without weight decay, and the mask token."""
        return super().no_weight_decay() | {"decoder.mask_token"}

    def set_activation_checkpointing(self, mode: str) -> None:
        """Recompute activations of blocks of the encoder and of the decoder."""
        super().set_activation_checkpointing(mode)
        self.decoder.activation_checkpointing = mode  # type: ignore[assignment]

    def compile_blocks(self, **options: Any) -> None:
        """Compile each block of the encoder and of the decoder in place."""
        super().compile_blocks(**options)
        for block in self.decoder.blocks:
            block.compile(**options)
