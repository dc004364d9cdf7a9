"""The Vision Transformer. Modules and parameters have timm's names, so state dicts are interchangeable.

Shapes: B batch, C channels, H W pixels, G patches, K kept patches, N tokens (prefix and patches), D token width.
Prefix tokens come before the patches: class, distillation, registers.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vit_scale import kernels
from vit_scale.errors import UserError
from vit_scale.kernels import Shortcut
from vit_scale.kernels.watch import remember_types
from vit_scale.models.attention import NORM_EPS, Kernel
from vit_scale.models.block import Block, is_recomputed, run_block
from vit_scale.models.interface import full_shape
from vit_scale.models.layers.drop_path import drop_path_rates
from vit_scale.models.layers.dropout import Dropout, drop_patches, keep_patches
from vit_scale.models.layers.patch_embed import PatchEmbed
from vit_scale.models.layers.pos_embed import RelativeBias, RotaryEmbedding, RowColumnEmbedding, sincos_2d
from vit_scale.models.layers.token_groups import Grid
from vit_scale.models.variants import Pool, Variant
from vit_scale.models.weights.freeze import keep_frozen_in_eval
from vit_scale.models.weights.init import is_token_or_position
from vit_scale.models.weights.resample import resample_positions


class VisionTransformer(nn.Module):
    """A plain ViT with options; `variant` determines the shapes of the weights.

    A new model has torch's default weights: `create_model` initializes it, or `models.weights.init.init_weights`.
    """

    pos_embed: nn.Parameter | Tensor | RowColumnEmbedding | None

    def __init__(
        self,
        variant: Variant,
        *,
        drop_path: float = 0.0,
        drop_path_schedule: Literal["linear", "uniform"] = "linear",
        drop_path_mode: Literal["skip", "mask"] = "skip",
        patch_dropout: float = 0.0,
        kernel: Kernel = "auto",
    ) -> None:
        super().__init__()
        self.variant = variant
        self.num_classes, self.in_chans = variant.num_classes, variant.in_chans
        self.img_size, self.patch_size = variant.img_size, variant.patch_size
        self.embed_dim, self.depth = variant.embed_dim, variant.depth
        self.num_prefix_tokens = variant.num_prefix_tokens
        self.patch_dropout = patch_dropout
        self.kernel = kernel
        self.frozen_layers = 0
        self.distilled_training = False
        self.activation_checkpointing: Literal["none", "selective", "full"] = "none"

        dim = variant.embed_dim
        self.patch_embed = PatchEmbed(variant.img_size, variant.patch_size, variant.in_chans, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if variant.class_token else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, dim)) if variant.distilled else None
        self.reg_token = nn.Parameter(torch.zeros(1, variant.registers, dim)) if variant.registers else None
        self._add_pos_embed()
        self.pos_drop = Dropout(variant.dropout) if variant.dropout else nn.Identity()
        rates = drop_path_rates(drop_path, variant.depth, drop_path_schedule)
        self.blocks = nn.ModuleList(
            Block(
                variant,
                index,
                position=_attention_position(variant, index),
                drop_path=rate,
                drop_path_mode=drop_path_mode,
                kernel=kernel,
            )
            for index, rate in enumerate(rates)
        )
        late = variant.norm_after_pool
        self.norm = nn.Identity() if late else nn.LayerNorm(dim, eps=NORM_EPS)
        self.fc_norm = nn.LayerNorm(dim, eps=NORM_EPS) if late else nn.Identity()
        self.head = _head(variant)
        if variant.distilled:
            self.head_dist = _head(variant)
        remember_types(self)

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(self, x_BCHW: Tensor, keep_BK: Tensor | None = None, intermediates: Iterable[int] = ()) -> Any:
        """Return logits; in training with `distilled_training`, those of both heads (class, distillation).

        Without a head (`num_classes=0`), return the pooled features. `keep_BK`: indices of the patches whose tokens
        are computed, instead of those that patch dropout draws; None: all patches, except for patch dropout. With
        `intermediates`, return a pair: the above, and the patch tokens [B, G, D] after each of these blocks.
        """
        if not intermediates:
            return self.forward_head(self._features(x_BCHW, keep_BK, kernels.choose(self), self.variant.head_tokens))
        wanted = _take_indices(intermediates, self.depth)
        self._check_every_patch("intermediates")
        found = dict.fromkeys(wanted)
        head_tokens = None if self.depth - 1 in found else self.variant.head_tokens
        output = self.forward_head(self._features(x_BCHW, None, kernels.choose(self), head_tokens, found))
        return output, [found[index][:, self.num_prefix_tokens :] for index in wanted]  # type: ignore[index]

    def forward_features(self, x_BCHW: Tensor, keep_BK: Tensor | None = None) -> Tensor:
        """Return every token after the last norm, [B, N, D]; `keep_BK` as in `forward`."""
        return self._features(x_BCHW, keep_BK, kernels.choose(self), None)

    def forward_head(self, x_BND: Tensor, pre_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Map tokens to logits, or with `pre_logits` to the features that the head receives."""
        if self.variant.distilled:
            return self._forward_two_heads(x_BND, pre_logits)
        pooled = self.fc_norm(_pool(x_BND, self.variant.pool, self.num_prefix_tokens))
        return pooled if pre_logits else self.head(pooled)

    def forward_intermediates(
        self,
        x_BCHW: Tensor,
        indices: Iterable[int] | int | None = None,
        *,
        as_maps: bool = True,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Tensor] | list[tuple[Tensor, Tensor]]:
        """Return patch tokens after some blocks, as maps [B, D, rows, columns] or tokens [B, G, D].

        `indices`: block indices, negative from the end; an integer n: the last n blocks; None: all.
        With `return_prefix_tokens` each is a pair with the prefix tokens; `norm` applies the last norm to each.
        """
        wanted = _take_indices(indices, self.depth)
        self._check_every_patch("forward_intermediates")
        shortcut = kernels.choose(self)
        x_BND, keep_BN = self._embed(x_BCHW)
        found = {}
        prefix, grid = self.num_prefix_tokens, self._grid_of(x_BCHW)
        for index, block in enumerate(self.blocks[: max(wanted) + 1]):
            x_BND = self._run(index, block, x_BND, keep_BN, shortcut, grid)
            if index in wanted:
                found[index] = self.norm(x_BND) if norm else x_BND
        patches = [found[i][:, prefix:] for i in wanted]
        if as_maps:
            patches = [x_BGD.transpose(1, 2).unflatten(2, grid).contiguous() for x_BGD in patches]
        if return_prefix_tokens:
            return [(patch, found[i][:, :prefix]) for patch, i in zip(patches, wanted, strict=True)]
        return patches

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Any:
        """Set training mode, except of frozen parts."""
        super().train(mode)
        keep_frozen_in_eval(self)
        return self

    @property
    def num_layers(self) -> int:
        """Return the number of layers for layer-wise learning rates: the embedding, every block, the head."""
        return self.depth + 2

    def layer_id(self, parameter_name: str) -> int:
        """Return 0 for patches, tokens and positions, 1 to depth for blocks, depth + 1 for last norm and head."""
        root, _, rest = parameter_name.partition(".")
        if root == "blocks":
            return int(rest.split(".")[0]) + 1
        if root == "patch_embed" or is_token_or_position(parameter_name):
            return 0
        return self.depth + 1

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay: tokens, positions and all vectors (biases, norms, LayerScale)."""
        return {name for name, p in self.named_parameters() if len(full_shape(p)) <= 1 or is_token_or_position(name)}

    def allow_any_size(self) -> None:
        """Accept images of any size that patches divide from now on; position embeddings are resampled to them."""
        if self.variant.pos_embed in ("rope", "relative"):
            raise UserError(f"model.pos_embed = {self.variant.pos_embed!r} supports only the image size of the model")
        self.patch_embed.any_size = True

    def set_activation_checkpointing(self, mode: Literal["none", "selective", "full"]) -> None:
        """Recompute activations in the backward pass of no block, every second block, or every block."""
        self.activation_checkpointing = mode

    def compile_blocks(self, **options: Any) -> None:
        """Compile each block in place, with options of torch.compile; parameter names do not change.

        Equal blocks share their compiled code, except the last, which may compute fewer tokens. Different drop rates
        make no difference (`DropPath.draw`), except that a rate of 0 has simpler code.
        """
        for block in self.blocks:
            block.compile(**options)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _add_pos_embed(self) -> None:
        variant = self.variant
        prefix = variant.num_prefix_tokens if variant.embed_prefix else 0
        if variant.pos_embed == "learned":
            length = variant.grid[0] * variant.grid[1] + prefix
            self.pos_embed = nn.Parameter(torch.zeros(1, length, variant.embed_dim))
        elif variant.pos_embed == "learned_2d":
            self.pos_embed = RowColumnEmbedding(variant.grid, variant.embed_dim)
        elif variant.pos_embed == "sincos":
            # In the state dict, so that the weights load into timm's model, where it is learned.
            fixed = nn.functional.pad(sincos_2d(variant.grid, variant.embed_dim), (0, 0, prefix, 0))
            self.register_buffer("pos_embed", fixed[None])
        else:
            self.pos_embed = None

    def _features(
        self,
        x_BCHW: Tensor,
        keep_BK: Tensor | None,
        shortcut: Shortcut | None,
        head_tokens: int | None,
        found: dict[int, Tensor | None] | None = None,
    ) -> Tensor:
        """Return the tokens after the last norm; with a shortcut, only the `head_tokens` leading ones.

        `found` receives the tokens after the blocks that are its keys.
        """
        x_BND, keep_BN = self._embed(x_BCHW, keep_BK)
        grid = self._grid_of(x_BCHW)
        for index, block in enumerate(self.blocks):
            if shortcut is not None and index == self.depth - 1:
                shortcut = shortcut._replace(tokens=head_tokens)
            x_BND = self._run(index, block, x_BND, keep_BN, shortcut, grid)
            if found is not None and index in found:
                found[index] = x_BND
        return self.norm(x_BND)

    def _check_every_patch(self, caller: str) -> None:
        if self.training and self.patch_dropout:
            raise UserError(f"{caller} needs every patch: call model.eval(), or set model.patch_dropout=0.")

    def _embed(self, x_BCHW: Tensor, keep_BK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return tokens with their positions, and the indices of those that are kept; None if all are."""
        x_BGD = self.patch_embed(x_BCHW)
        prefix_1PD = self._prefix_tokens()
        pos = self.pos_embed() if isinstance(self.pos_embed, RowColumnEmbedding) else self.pos_embed
        if pos is not None:
            patches = self.variant.grid[0] * self.variant.grid[1]
            x_BGD = x_BGD + self._positions_for(x_BCHW, pos[:, -patches:])
            if pos.shape[1] > patches:
                prefix_1PD = prefix_1PD + pos[:, :-patches]
        x_BND = self.pos_drop(torch.cat([prefix_1PD.expand(x_BGD.shape[0], -1, -1), x_BGD], dim=1))
        if keep_BK is not None:
            return keep_patches(x_BND, keep_BK, self.num_prefix_tokens)
        if self.training and self.patch_dropout:
            return drop_patches(x_BND, self.patch_dropout, self.num_prefix_tokens)
        return x_BND, None

    def _positions_for(self, x_BCHW: Tensor, pos_1GD: Tensor) -> Tensor:
        """Return the position embeddings of patches, resampled if images do not have the model's own size."""
        grid = self._grid_of(x_BCHW)
        return pos_1GD if grid == self.variant.grid else resample_positions(pos_1GD, self.variant.grid, grid)

    def _grid_of(self, x_BCHW: Tensor) -> tuple[int, int]:
        """Return rows and columns of patches of these images."""
        return x_BCHW.shape[2] // self.patch_size[0], x_BCHW.shape[3] // self.patch_size[1]

    def _prefix_tokens(self) -> Tensor:
        tokens = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        return torch.cat([*tokens], dim=1) if tokens else self.patch_embed.proj.weight.new_zeros(1, 0, self.embed_dim)

    def _run(
        self,
        index: int,
        block: nn.Module,
        x_BND: Tensor,
        keep_BN: Tensor | None,
        shortcut: Shortcut | None,
        grid: Grid,
    ) -> Tensor:
        recompute = is_recomputed(index, self.activation_checkpointing)
        other = None if grid == self.variant.grid else grid
        return run_block(block, x_BND, keep_BN, shortcut, grid=other, recompute=recompute)

    def _forward_two_heads(self, x_BND: Tensor, pre_logits: bool) -> Tensor | tuple[Tensor, Tensor]:
        class_BD, distilled_BD = x_BND[:, 0], x_BND[:, 1]
        if pre_logits:
            return (class_BD + distilled_BD) / 2
        logits, distilled_logits = self.head(class_BD), self.head_dist(distilled_BD)
        if self.distilled_training and self.training:
            return logits, distilled_logits
        return (logits + distilled_logits) / 2


def _pool(x_BND: Tensor, pool: Pool, prefix: int) -> Tensor:
    """Return the class token, the mean or maximum of patch tokens [B, D], or every token [B, N, D]."""
    if pool == "cls":
        return x_BND[:, 0]
    if pool == "mean":
        return x_BND[:, prefix:].mean(dim=1)
    if pool == "max":
        return x_BND[:, prefix:].amax(dim=1)
    return x_BND


def _head(variant: Variant) -> nn.Module:
    return nn.Linear(variant.embed_dim, variant.num_classes) if variant.num_classes else nn.Identity()


def _attention_position(variant: Variant, index: int) -> RotaryEmbedding | RelativeBias | None:
    prefix = variant.num_prefix_tokens
    if variant.pos_embed == "rope":
        return RotaryEmbedding(variant.grid, prefix, variant.embed_dim // variant.num_heads)
    if variant.pos_embed == "relative":
        grouping = variant.grouping_of(index)
        all_pairs = grouping is None or grouping.is_one_group(variant.grid)
        return RelativeBias(variant.grid, prefix, variant.num_heads, all_pairs=all_pairs)
    return None


def _take_indices(indices: Iterable[int] | int | None, depth: int) -> list[int]:
    if indices is None:
        return list(range(depth))
    if isinstance(indices, int):
        indices = range(depth - indices, depth)
    taken = [i + depth if i < 0 else i for i in indices]
    if not taken or not all(0 <= i < depth for i in taken):
        raise UserError(f"indices: block indices are 0 to {depth - 1} (negative from the end), got {list(indices)}.")
    return taken
