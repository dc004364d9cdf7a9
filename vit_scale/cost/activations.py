"""Activation memory: bytes per image saved by the forward pass for the backward pass.

For vit_scale models it is computed in closed form from the tensors each operation saves for its gradient. With N
tokens of dimension d, H heads, an MLP of dimension h, b bytes per element in the compute precision and a residual
stream in fp32 (under autocast too), a standard block saves

    norms      2 x (4 N d + 8 N)         residual stream before both norms; mean and std per token
    attention  b (1 + 3 + 1) N d + 4NH   input; queries, keys, values; output; logsumexp per row and head
    mlp        b (N d + 2 N h)           input; hidden layer before and after GELU

Only the kernels `math` and `explicit` save the attention matrix itself (N x N, or n x n per group of n tokens). In
groups (`window`, `dilated`, `block`), scaled_dot_product_attention reads copies of queries, keys and values, which are
saved too. Linear attention saves the random features of queries and keys in fp32. Our CPU kernels save neither.

Autocast also caches weights in half precision, which do not grow with the batch; `memory.py` counts them. Dropout masks
take one byte per element. If the head reads only the class token, the last block saves its input, keys and values, and
everything else for that token only. Activation gradients are not counted: they exist for one block at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from vit_scale.cost.closed_form import (
    Checkpointing,
    attended_pairs,
    computed_fraction,
    computed_tokens,
    groups_of,
    recomputed_blocks,
    training_tokens,
)
from vit_scale.cost.meta import twin
from vit_scale.kernels import cpu_attention, cpu_linear_attention
from vit_scale.models.layers.drop_path import drop_path_rates
from vit_scale.models.variants import Variant

Precision = Literal["fp32", "bf16", "fp16"]
_STREAM_BYTES = 4
_STATS_BYTES = 8


@dataclass(frozen=True)
class Activations:
    """Bytes per image."""

    by_part: dict[str, int]
    """Saved from the forward to the backward pass; with checkpointing, `block_inputs` replace entire blocks."""
    recomputed: int = 0
    """Activations of the largest block recomputed in the backward pass, in addition to the saved ones."""

    @property
    def total(self) -> int:
        """Peak activation memory."""
        return sum(self.by_part.values()) + self.recomputed


def vit_activations(
    variant: Variant,
    *,
    precision: Precision = "bf16",
    drop_path: float = 0.0,
    drop_path_schedule: Literal["linear", "uniform"] = "linear",
    drop_path_mode: Literal["skip", "mask"] = "skip",
    patch_dropout: float = 0.0,
    activation_checkpointing: Checkpointing = "none",
    kernel: str = "auto",
    frozen_layers: int = 0,
    on_cpu: bool = False,
) -> Activations:
    """Compute the activation memory of a vit_scale model, averaged over large batches.

    `frozen_layers`: leading layers that save nothing, as `ImageModel.frozen_layers`. `on_cpu`: whether a CPU
    trains, for which there are kernels of our own.
    """
    tokens = training_tokens(variant, patch_dropout)
    # The kernel `explicit` is plain code throughout, which computes every token in every block.
    skips = kernel != "explicit"
    parts = _ends(variant, (variant.head_tokens or tokens) if skips else tokens, precision, frozen_layers)
    if patch_dropout and not frozen_layers:
        parts["patch_dropout"] = _STREAM_BYTES * training_tokens(variant, 0.0) * variant.embed_dim + 8 * tokens
    recomputed = 0
    rates = drop_path_rates(drop_path, variant.depth, drop_path_schedule)
    recomputes = recomputed_blocks(variant.depth, activation_checkpointing)
    blocks = list(zip(rates, computed_tokens(variant), recomputes, strict=True))
    has_cpu_kernel = on_cpu and _has_cpu_kernel(variant, kernel, precision)
    for index, (rate, first, recompute) in list(enumerate(blocks))[max(0, frozen_layers - 1) :]:
        computed = (first or tokens) if skips else tokens
        attention = _attention(variant, index, tokens, computed, precision, kernel, has_cpu_kernel=has_cpu_kernel)
        block = _block(variant, tokens, computed, precision, attention)
        block = {part: round(size * computed_fraction(rate, drop_path_mode)) for part, size in block.items()}
        if recompute:
            recomputed = max(recomputed, sum(block.values()))
            block = {"block_inputs": _STREAM_BYTES * tokens * variant.embed_dim}
        for part, size in block.items():
            parts[part] = parts.get(part, 0) + size
    return Activations(parts, recomputed)


def _block(variant: Variant, tokens: int, computed: int, precision: Precision, attention: int) -> dict[str, int]:
    """Bytes per image that a block saves if its branches run, with `computed` of its tokens computed."""
    number = number_bytes(precision)
    all_stream, stream = tokens * variant.embed_dim, computed * variant.embed_dim
    hidden = (2 if variant.mlp == "gelu" else 4) * computed * variant.mlp_width
    parts = {
        "norms": _STREAM_BYTES * (all_stream + stream) + _STATS_BYTES * (tokens + computed),
        "attention": attention,
        "mlp": number * (stream + hidden),
    }
    if variant.qk_norm:
        parts["norms"] += _STATS_BYTES * (tokens + computed) * variant.num_heads
    if variant.layer_scale is not None:
        parts["layer_scale"] = 2 * number * stream
    if variant.dropout:
        parts["dropout"] = 2 * stream + computed * variant.mlp_width
    return parts


def _attention(
    variant: Variant, index: int, tokens: int, computed: int, precision: Precision, kernel: str, *, has_cpu_kernel: bool
) -> int:
    """Bytes per image that attention saves."""
    number, dim = number_bytes(precision), variant.embed_dim
    # The input; queries, keys and values; the output.
    saved = number * dim * (3 * tokens + 2 * computed) + 4 * computed * variant.num_heads
    is_changed = variant.qk_norm or variant.pos_embed == "rope"
    if is_changed:  # Queries and keys before and after.
        saved += number * dim * (tokens + computed)
    if variant.attention_of(index) == "linear":
        if has_cpu_kernel:  # Queries of all tokens; no logsumexp.
            return saved + number * dim * (tokens - computed) - 4 * computed * variant.num_heads
        return saved + _linear_attention(variant, tokens, computed, precision)
    groups = groups_of(variant, index) if computed == tokens else None
    if groups is not None and not has_cpu_kernel:
        saved += _group_copies(variant, groups, tokens, number, kernel)
    if kernel in ("math", "explicit"):
        pairs = computed * tokens if groups is None else attended_pairs(variant, index, tokens)
        # autocast computes softmax in fp32 and then copies it to half precision
        saved += variant.num_heads * pairs * (number if precision == "fp32" else number + 4)
    return saved


def _group_copies(variant: Variant, groups: dict[int, int], tokens: int, number: int, kernel: str) -> int:
    """Bytes that attention in groups saves in addition to full attention."""
    prefix, dim = variant.num_prefix_tokens, variant.embed_dim
    patches = tokens - prefix
    is_normalized, is_changed = variant.qk_norm, variant.qk_norm or variant.pos_embed == "rope"
    # Queries, keys and values in the order of the groups, and the output in that order.
    if kernel == "flex":
        copied, originals_are_saved = 4 * tokens, False
    else:
        copied, originals_are_saved = 4 * patches + 2 * prefix * sum(groups.values()) + prefix, prefix > 0
    if kernel in ("math", "explicit"):  # They save neither their outputs nor queries before scaling.
        copied -= 2 * patches + prefix if prefix else patches
    if not originals_are_saved:
        copied -= 0 if is_normalized else 3 * tokens
        copied -= 2 * tokens if is_changed else 0
    return number * dim * copied


def _linear_attention(variant: Variant, tokens: int, computed: int, precision: Precision) -> int:
    """Bytes that linear attention saves in addition to full attention, nearly all of them random features in fp32."""
    dim, number = variant.embed_dim, number_bytes(precision)
    features = variant.num_random_features * variant.num_heads
    # Scaled keys, values, outputs before division; exponentials and features of queries and keys.
    saved = _STREAM_BYTES * (dim * (2 * tokens + computed) + 2 * features * (tokens + computed))
    saved += _STREAM_BYTES * features * (variant.head_dim + 1)  # The product of keys and values.
    originals = 0 if variant.qk_norm else number * dim * (2 * tokens + computed)
    changed = number * dim * (tokens + computed) if variant.qk_norm or variant.pos_embed == "rope" else 0
    return saved - originals - changed


def _has_cpu_kernel(variant: Variant, kernel: str, precision: Precision) -> bool:
    """Return whether our CPU kernel computes attention, which reads groups where they are and saves no features."""
    has_extras = variant.qk_norm or variant.pos_embed in ("rope", "relative") or variant.attn_dropout > 0
    if kernel != "auto" or precision != "fp32" or has_extras or variant.head_dim % cpu_attention.WIDTHS:
        return False
    return cpu_linear_attention.is_built() if variant.attention == "linear" else cpu_attention.runs_groups()


def _ends(variant: Variant, tokens: int, precision: Precision, frozen_layers: int) -> dict[str, int]:
    """Return the bytes that are saved before the blocks, and after them for `tokens` tokens."""
    stream = _STREAM_BYTES * tokens * variant.embed_dim
    height, width = variant.img_size
    parts = {"head": 0}
    if not frozen_layers:
        parts["image"] = number_bytes(precision) * variant.in_chans * height * width
    if not variant.norm_after_pool and frozen_layers <= variant.depth + 1:
        parts["norms"] = stream + _STATS_BYTES * tokens
    if variant.dropout and not frozen_layers:
        parts["dropout"] = training_tokens(variant, 0.0) * variant.embed_dim
    # In fp32 the class token saved by the head is a view that keeps all tokens alive.
    if variant.pool == "max" or (variant.pool in ("cls", "tokens") and precision == "fp32"):
        parts["head"] = stream
    elif variant.pool == "tokens":
        parts["head"] = stream // 2
    return parts


def number_bytes(precision: Precision) -> int:
    """Bytes per element in the compute precision."""
    return 4 if precision == "fp32" else 2


def measured_activations(
    model: nn.Module, img_size: tuple[int, int], in_chans: int, precision: Precision = "bf16"
) -> Activations:
    """Measure the activation memory per image of any model, on fake tensors.

    The difference between three images and two excludes everything that does not grow with the batch.
    """
    two, three = (saved_bytes(model, (images, in_chans, *img_size), precision) for images in (2, 3))
    return Activations({"saved_tensors": three - two})


def saved_bytes(model: nn.Module, shape: tuple[int, ...], precision: Precision) -> int:
    """Bytes of all distinct storages saved by a forward pass in training mode, excluding parameters and buffers.

    bf16 represents fp16, which autocast does not support on CPU.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    saved: dict[int, torch.UntypedStorage] = {}
    own: set[int] = set()

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage  # keep a reference so that the address is not reused
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = twin(model, device="cpu").train()
        own.update(t.untyped_storage()._cdata for t in (*fake.parameters(), *fake.buffers()))
        hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
            fake(torch.empty(shape))
    return sum(storage.nbytes() for storage in saved.values())
