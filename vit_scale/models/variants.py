"""The table of model variants. Nothing here imports torch, so names are checked and listed immediately.

Sizes Ti, S, B, L, H: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words" (arXiv:2010.11929), table 1, and
Touvron et al. 2021, "Training data-efficient image transformers" (arXiv:2012.12877), table 1; g: Zhai et al. 2022,
"Scaling Vision Transformers" (arXiv:2106.04560), table 2. DeiT III with LayerScale: Touvron et al. 2022
(arXiv:2204.07118). Registers: Darcet et al. 2024 (arXiv:2309.16588); DINOv2's shapes: Oquab et al. 2024
(arXiv:2304.07193). Names are timm's if timm has the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from vit_scale.config import ModelConfig
from vit_scale.errors import UserError, nearest
from vit_scale.models.layers.token_groups import Grouping

TIMM_PREFIX = "timm/"

Mlp = Literal["gelu", "swiglu"]
PosEmbed = Literal["learned", "learned_2d", "sincos", "rope", "relative", "none"]
AttentionKind = Literal["full", "window", "dilated", "block", "linear"]
Pool = Literal["cls", "mean", "max", "tokens"]
Normalization = Literal["imagenet", "inception", "cifar10"]

PIXEL_STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "inception": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
"""Mean and standard deviation per channel, for pixels from 0 to 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Everything that determines the shapes of the weights. ModelConfig can override fields that it also has."""

    img_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    in_chans: int = 3
    num_classes: int = 1000
    """0: no head; the model returns pooled features."""
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float = 4.0
    mlp: Mlp = "gelu"
    dropout: float = 0.0
    attn_dropout: float = 0.0
    layer_scale: float | None = None
    pos_embed: PosEmbed = "learned"
    embed_prefix: bool = True
    """Class, distillation and register tokens also have a position embedding (timm: not `no_embed_class`)."""
    pool: Pool = "cls"
    fc_norm: bool | None = None
    """Apply the last norm after pooling; None: if patch tokens are pooled."""
    class_token: bool = True
    registers: int = 0
    distilled: bool = False
    qk_norm: bool = False
    qkv_bias: bool = True
    bias: bool = True
    attention: AttentionKind = "full"
    window: int | None = None
    window_shift: bool = True
    dilation: int | None = None
    random_features: int | None = None
    """None: d ln d for a head width d."""
    global_blocks: tuple[int, ...] = ()
    """Blocks with full attention although `attention` is another kind; negative: from the end."""
    normalization: Normalization = "imagenet"
    """Pixel statistics that the published weights expect; a key of PIXEL_STATISTICS."""
    timm_name: str | None = None
    """Name of the same model in timm; None: timm has the class but no name for it."""

    @property
    def grid(self) -> tuple[int, int]:
        """Return the number of patches along height and width."""
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    @property
    def num_prefix_tokens(self) -> int:
        """Return the number of tokens before the patches: class, distillation, registers."""
        return int(self.class_token) + int(self.distilled) + self.registers

    @property
    def head_tokens(self) -> int | None:
        """Return how many leading tokens the head reads; None: all. The last block may skip the others."""
        if self.distilled:
            return 2
        return 1 if self.pool == "cls" else None

    @property
    def mlp_width(self) -> int:
        """Return the hidden width of the MLP. SwiGLU has three matrices: two thirds preserve the parameter count."""
        width = int(self.embed_dim * self.mlp_ratio)
        return width if self.mlp == "gelu" else (width * 2 // 3 + 7) // 8 * 8

    @property
    def head_dim(self) -> int:
        """Return the width of an attention head."""
        return self.embed_dim // self.num_heads

    @property
    def num_random_features(self) -> int:
        """Return the random features per head of linear attention."""
        return self.random_features or max(1, round(self.head_dim * math.log(self.head_dim)))

    def attention_of(self, block: int) -> AttentionKind:
        """Return the kind of attention of the block with this index."""
        is_global = block in self.global_blocks or block - self.depth in self.global_blocks
        return "full" if is_global else self.attention

    def grouping_of(self, block: int) -> Grouping | None:
        """Return how the block with this index groups the patches; None: it does not (full and linear attention)."""
        kind = self.attention_of(block)
        if kind in ("full", "linear"):
            return None
        shifted = kind == "window" and self.window_shift and block % 2 == 1
        return Grouping(self.window, self.dilation if kind == "dilated" else None, shifted, bands=kind == "block")

    @property
    def norm_after_pool(self) -> bool:
        """Return whether the last norm is `fc_norm` (after pooling) instead of `norm` (before)."""
        return self.pool in ("mean", "max") if self.fc_norm is None else self.fc_norm


_SIZES: dict[str, dict[str, int | float]] = {
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "medium": {"embed_dim": 512, "depth": 12, "num_heads": 8},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "huge": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
    "giant": {"embed_dim": 1408, "depth": 40, "num_heads": 16, "mlp_ratio": 48 / 11},
}

# The rest of the plain grid (such as vit_small_patch14_224) is the same class in timm, but has no name there.
_PLAIN_IN_TIMM: dict[str, set[tuple[int, int]]] = {
    "tiny": {(16, 224), (16, 384)},
    "small": {(8, 224), (16, 224), (32, 224), (16, 384), (32, 384)},
    "base": {(8, 224), (16, 224), (32, 224), (16, 384), (32, 384)},
    "large": {(14, 224), (16, 224), (32, 224), (16, 384), (32, 384)},
    "huge": {(14, 224)},
    "giant": {(14, 224)},
}


def _variant(size: str, patch: int, pixels: int, **changes: object) -> Variant:
    fields: dict[str, object] = {"img_size": (pixels, pixels), "patch_size": (patch, patch), **_SIZES[size], **changes}
    return Variant(**fields)  # type: ignore[arg-type]


def _plain() -> dict[str, Variant]:
    """Return Ti, S, B, L, H, g at every patch size of 8, 14, 16, 32 that divides 224 or 384 pixels."""
    table = {}
    for size, in_timm in _PLAIN_IN_TIMM.items():
        for patch, pixels in ((8, 224), (14, 224), (16, 224), (32, 224), (8, 384), (16, 384), (32, 384)):
            name = f"vit_{size}_patch{patch}_{pixels}"
            timm_name = name if (patch, pixels) in in_timm else None
            # timm's weights of this name are DINO's, trained with ImageNet's statistics.
            normalization = "imagenet" if name == "vit_small_patch8_224" else "inception"
            table[name] = _variant(size, patch, pixels, timm_name=timm_name, normalization=normalization)
    return table


def _deit() -> dict[str, Variant]:
    """Return DeiT, plain and with a distillation token; the same shapes as the plain ViTs."""
    table = {}
    for size, pixels in (("tiny", 224), ("small", 224), ("base", 224), ("base", 384)):
        for kind, distilled in (("", False), ("distilled_", True)):
            name = f"deit_{size}_{kind}patch16_{pixels}"
            table[name] = _variant(size, 16, pixels, timm_name=name, distilled=distilled)
    return table


def _deit3() -> dict[str, Variant]:
    """Return DeiT III: LayerScale, and no position embedding for the class token."""
    shapes = [("small", 16, 224), ("small", 16, 384), ("medium", 16, 224), ("base", 16, 224), ("base", 16, 384)]
    shapes += [("large", 16, 224), ("large", 16, 384), ("huge", 14, 224)]
    table = {}
    for size, patch, pixels in shapes:
        name = f"deit3_{size}_patch{patch}_{pixels}"
        table[name] = _variant(size, patch, pixels, timm_name=name, layer_scale=1e-6, embed_prefix=False)
    return table


def _modern() -> dict[str, Variant]:
    """Return models with mean pooling, registers and SwiGLU, as in timm."""
    gap = {"class_token": False, "pool": "mean", "normalization": "inception"}
    registers = {"registers": 4, "embed_prefix": False}
    dinov2 = {**registers, "layer_scale": 1e-5}
    table = {
        "vit_base_patch16_gap_224": _variant("base", 16, 224, **gap, num_heads=16, fc_norm=False),
        "vit_medium_patch16_reg4_gap_256": _variant("medium", 16, 256, **gap, **registers, layer_scale=1e-5),
        "vit_base_patch16_reg4_gap_256": _variant("base", 16, 256, **gap, **registers),
        "vit_small_patch14_reg4_dinov2": _variant("small", 14, 518, **dinov2),
        "vit_base_patch14_reg4_dinov2": _variant("base", 14, 518, **dinov2),
        "vit_large_patch14_reg4_dinov2": _variant("large", 14, 518, **dinov2),
        "vit_giant_patch14_reg4_dinov2": _variant(
            "giant", 14, 518, **dinov2, embed_dim=1536, num_heads=24, mlp_ratio=4.0, mlp="swiglu"
        ),
    }
    return {name: dataclasses.replace(variant, timm_name=name) for name, variant in table.items()}


def _cifar() -> dict[str, Variant]:
    """Return the 32-pixel family, and `vit_mu` for tests."""
    common: dict[str, object] = {"num_classes": 10, "dropout": 0.1, "normalization": "cifar10"}
    return {
        "vit_cifar_small": _variant("tiny", 4, 32, **common),
        "vit_cifar_base": _variant("small", 4, 32, **common),
        "vit_cifar_large": _variant("medium", 4, 32, **common, depth=24),
        "vit_cifar_512x6": _variant("medium", 8, 32, **common, depth=6, num_heads=4),
        "vit_mu": _variant("tiny", 8, 32, num_classes=10, embed_dim=32, depth=2, num_heads=2),
    }


VARIANTS: dict[str, Variant] = {**_plain(), **_deit(), **_deit3(), **_modern(), **_cifar()}


def get_variant(name: str) -> Variant:
    """Return the row of the table; raise `UserError` with the nearest names if there is none."""
    if name not in VARIANTS:
        raise UserError(f"model.name: unknown model {name!r}.{_nearest(name, list(VARIANTS))}")
    return VARIANTS[name]


def resolve_variant(config: ModelConfig) -> Variant:
    """Return the row of the table with the options of a recipe applied, checked."""
    variant = get_variant(config.name)
    changes = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(Variant)
        if getattr(config, field.name, None) is not None
    }
    for size in ("img_size", "patch_size"):
        if isinstance(changes.get(size), int):
            changes[size] = (changes[size], changes[size])
    variant = dataclasses.replace(variant, **changes)
    _check_variant(variant)
    return variant


def _check_variant(variant: Variant) -> None:
    for side, pixels, patch in zip(("height", "width"), variant.img_size, variant.patch_size, strict=True):
        if pixels % patch or pixels < patch:
            below, above = pixels // patch * patch, (pixels // patch + 1) * patch
            near = f"{below} or {above}" if below else f"{above}"
            raise UserError(f"model.img_size: patch size {patch} does not divide the {side} {pixels}; use {near}.")
    if variant.embed_dim % variant.num_heads:
        raise UserError(f"model.num_heads = {variant.num_heads} does not divide model.embed_dim = {variant.embed_dim}.")
    head_dim = variant.embed_dim // variant.num_heads
    if variant.pos_embed == "rope" and head_dim % 4:
        raise UserError(f"model.pos_embed = rope requires a head width that is a multiple of 4, not {head_dim}.")
    if variant.pos_embed == "sincos" and variant.embed_dim % 4:
        raise UserError(f"model.pos_embed = sincos requires a width that is a multiple of 4, not {variant.embed_dim}.")
    if variant.pool == "cls" and not variant.class_token:
        raise UserError("model.pool = cls requires a class token: set model.class_token=true or model.pool=mean.")
    if variant.distilled and (variant.pool != "cls"):
        raise UserError(
            f"model.distilled = true has heads on two tokens; model.pool = {variant.pool} does not support that."
        )
    _check_attention(variant)
    check_groups(variant)


def _check_attention(variant: Variant) -> None:
    kind, unused = variant.attention, ("window", "dilation", "random_features", "global_blocks")
    if kind == "full" and (option := next((name for name in unused if getattr(variant, name)), None)):
        raise UserError(
            f"model.{option} = {getattr(variant, option)}: has no effect with model.attention = full; "
            f"set model.attention=window, dilated, block or linear, or model.{option}={_UNSET.get(option, 'null')}."
        )
    for block in variant.global_blocks:
        if not -variant.depth <= block < variant.depth:
            raise UserError(f"model.global_blocks: indices are 0 to {variant.depth - 1}, or negative; got {block}.")
    if kind != "linear":
        return
    if variant.pos_embed == "relative":
        raise UserError(
            "model.attention = linear and model.pos_embed = relative exclude each other: a bias per pair of tokens "
            "needs all attention weights. Use model.pos_embed=learned, sincos or rope, or another model.attention."
        )
    if variant.attn_dropout:
        raise UserError(
            f"model.attention = linear and model.attn_dropout = {variant.attn_dropout:g} exclude each other: there are "
            "no attention weights to drop. Use model.dropout, or another model.attention."
        )


_UNSET = {"global_blocks": "[]"}


def check_groups(variant: Variant, source: str = "") -> None:
    """Raise `UserError` if groups of patches do not divide the grid; `source`: the option that sets the image size."""
    kind, (rows, columns) = variant.attention, variant.grid
    if kind in ("full", "linear"):
        return
    if kind != "dilated" and variant.window is None:
        sizes = _listed(divisor for divisor in _divisors(rows) if kind == "block" or columns % divisor == 0)
        raise UserError(f"model.attention = {kind} requires model.window; for {rows} x {columns} patches: {sizes}.")
    if kind == "dilated" and variant.dilation is None:
        raise UserError("model.attention = dilated requires model.dilation, e.g. model.dilation=2.")
    dilation = variant.dilation or 1 if kind == "dilated" else 1
    lengths = (rows,) if kind == "block" else (rows, columns)
    step = (variant.window or 1) * dilation
    if all(length % step == 0 for length in lengths):
        return
    source = source or f"model.img_size = {_size(variant.img_size)}"
    what = f"model.window = {variant.window}" if variant.window else f"model.dilation = {dilation}"
    if variant.window and dilation > 1:
        what += f" times model.dilation = {dilation}"
    common = [divisor for divisor in _divisors(rows) if all(length % divisor == 0 for length in lengths)]
    raise UserError(
        f"{what} does not divide the {rows} x {columns} patches of {source}; use {_listed(common)}"
        f"{' as their product' if variant.window and dilation > 1 else ''}, or another image size."
    )


def is_grouped(variant: Variant) -> bool:
    """Return whether a block has patches in several groups, each of which attends to its own."""
    groupings = (variant.grouping_of(block) for block in range(variant.depth))
    return any(grouping is not None and not grouping.is_one_group(variant.grid) for grouping in groupings)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _listed(numbers: Iterable[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _size(size: tuple[int, int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]} x {size[1]}"


def check_model_name(name: str) -> None:
    """Raise `UserError` unless `create_model` knows this name. Imports timm for `timm/<name>` only."""
    if not name.startswith(TIMM_PREFIX):
        get_variant(name)
        return
    import timm

    # A name may end in the tag of pretrained weights, as in vit_tiny_patch16_224.augreg_in21k.
    timm_name = name.removeprefix(TIMM_PREFIX)
    known = timm.list_pretrained() if "." in timm_name else timm.list_models()
    if timm_name not in known:
        raise UserError(f"model.name: timm has no model {timm_name!r}.{_nearest(timm_name, known)}")


def pixel_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation per channel that the published weights of a model expect."""
    check_model_name(name)
    if not name.startswith(TIMM_PREFIX):
        return PIXEL_STATISTICS[VARIANTS[name].normalization]
    from timm.models import get_pretrained_cfg

    published = get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
    return (tuple(published.mean), tuple(published.std)) if published else PIXEL_STATISTICS["imagenet"]


def _nearest(name: str, names: list[str]) -> str:
    if near := nearest(name, names, n=3, cutoff=0.5):
        return f" Did you mean {', '.join(near)}?"
    return " See vit_scale/models/variants.py, or use timm/<any timm model>."
