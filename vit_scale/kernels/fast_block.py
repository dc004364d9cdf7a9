"""The forward pass of a transformer block with every shortcut.

The order of operations is that of models/block.py, attention.py and mlp.py. What differs: oneDNN matmuls, the CPU
attention kernel, residual sums and a GELU gradient in place, and only the requested tokens in the last block. Blocks
are duck-typed, because models/ imports this package. No hook but the strategy's sees the tensors in between.

Shapes: B batch, N tokens, Q tokens with a query, D token width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vit_scale.kernels import Shortcut, cpu_attention, cpu_linear_attention, onednn
from vit_scale.kernels.residual import add_branch_
from vit_scale.kernels.watch import call


def forward(
    block: Any,
    x_BND: Tensor,
    keep_BN: Tensor | None,
    shortcut: Shortcut,
    draws: tuple[Any, Any] = (None, None),
    grid: tuple[int, int] | None = None,
) -> Tensor:
    """Compute `block` for all tokens, or return only the leading `shortcut.tokens`, which still attend to all.

    `draws`: those of stochastic depth; None: each branch draws its own. `grid`: rows and columns of patches if they are
    not the model's own.
    """
    hooked = shortcut.hooked
    attention = partial(attention_forward, shortcut=shortcut, grid=grid)
    mlp = partial(mlp_forward, hooked=hooked)

    def attention_branch(x_BND: Tensor, keep_BN: Tensor | None) -> Tensor:
        return block.ls1(call(block.attn, attention, block.norm1(x_BND), keep_BN, hooked=hooked))

    def mlp_branch(x_BND: Tensor) -> Tensor:
        return block.ls2(call(block.mlp, mlp, block.norm2(x_BND), hooked=hooked))

    add_attention = partial(add_branch_, draw=draws[0])
    x_BND = call(block.drop_path1, add_attention, x_BND, attention_branch, keep_BN, hooked=hooked)
    # Only this block refers to the first sum, so the second one may overwrite it.
    add_mlp = partial(add_branch_, draw=draws[1], overwrite_x=True)
    return call(block.drop_path2, add_mlp, x_BND, mlp_branch, hooked=hooked)


def attention_forward(
    attn: Any, x_BND: Tensor, keep_BN: Tensor | None, *, shortcut: Shortcut, grid: tuple[int, int] | None = None
) -> Tensor:
    """Compute the module `attn` for all tokens, or for the leading `shortcut.tokens`."""
    hooked = shortcut.hooked
    if _is_plain(attn) and attn.is_linear and _linear_kernel_runs(attn, x_BND):
        qkv_BNC = _linear(attn.qkv, x_BND, hooked=hooked)
        directions_MK, epsilon = attn.random_features, attn.epsilon
        y_BQD = cpu_linear_attention.attend(qkv_BNC, attn.num_heads, directions_MK, epsilon, shortcut.tokens)
    elif shortcut.tokens is None and _is_plain(attn) and not attn.is_linear and _kernel_runs(attn, x_BND, grid):
        y_BQD = cpu_attention.attend(_linear(attn.qkv, x_BND, hooked=hooked), attn.num_heads, attn.groups(grid))
    else:
        y_BQD = attn.attend(*_queries_keys_values(attn, x_BND, shortcut), keep_BN, grid)
    return attn.proj_drop(_linear(attn.proj, y_BQD, hooked=hooked))


def _kernel_runs(attn: Any, x_BND: Tensor, grid: tuple[int, int] | None) -> bool:
    # A compiler would trace how the groups are made.
    return not torch.compiler.is_compiling() and cpu_attention.runs(x_BND, attn.num_heads, attn.groups(grid))


def _linear_kernel_runs(attn: Any, x_BND: Tensor) -> bool:
    return cpu_linear_attention.runs(x_BND, attn.num_heads, attn.random_features.shape[0])


def _is_plain(attn: Any) -> bool:
    """Return whether nothing is added to attention, and the fastest kernel computes it."""
    has_no_extras = attn.rope is None and attn.rel_pos is None and type(attn.q_norm) is nn.Identity
    return has_no_extras and attn.kernel == "auto" and not (attn.training and attn.attn_dropout)


def _queries_keys_values(attn: Any, x_BND: Tensor, shortcut: Shortcut) -> tuple[Tensor, Tensor, Tensor]:
    # A weight that wraps other tensors, such as a quantized one, need not support slices.
    if shortcut.tokens is None or hasattr(attn.qkv.weight, "__tensor_flatten__"):
        q_BND, k_BND, v_BND = attn.split(_linear(attn.qkv, x_BND, hooked=shortcut.hooked))
        return q_BND if shortcut.tokens is None else q_BND[:, : shortcut.tokens], k_BND, v_BND
    project = partial(_project_leading_queries, tokens=shortcut.tokens)
    q_BQD, kv_BNC = call(attn.qkv, project, x_BND, hooked=shortcut.hooked)
    k_BND, v_BND = kv_BNC.unflatten(-1, (2, -1)).unbind(2)
    return q_BQD, k_BND, v_BND


def _project_leading_queries(qkv: nn.Linear, x_BND: Tensor, *, tokens: int) -> tuple[Tensor, Tensor]:
    """Return queries of the leading tokens, [B, Q, D], and keys and values of all, [B, N, 2 D]."""
    dim = x_BND.shape[-1]
    q_bias, kv_bias = (None, None) if qkv.bias is None else (qkv.bias[:dim], qkv.bias[dim:])
    q_BQD = onednn.linear(x_BND[:, :tokens], qkv.weight[:dim], q_bias)
    return q_BQD, onednn.linear(x_BND, qkv.weight[dim:], kv_bias)


def mlp_forward(mlp: Any, x_BND: Tensor, *, hooked: bool) -> Tensor:
    """Compute the module `mlp`."""
    hidden_BNF = _linear(mlp.fc1, x_BND, hooked=hooked)
    if type(mlp.act) is nn.GELU:
        hidden_BNF = call(mlp.act, _gelu, hidden_BNF, hooked=hooked)
    else:
        hidden_BNF = mlp.activate(hidden_BNF)
    return mlp.drop2(_linear(mlp.fc2, mlp.drop1(hidden_BNF), hooked=hooked))


def _linear(layer: nn.Linear, x: Tensor, *, hooked: bool) -> Tensor:
    # A strategy may have replaced the layer.
    return call(layer, _onednn_linear if type(layer) is nn.Linear else type(layer).forward, x, hooked=hooked)


def _onednn_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return onednn.linear(x, layer.weight, layer.bias)


def _gelu(_layer: nn.GELU, x: Tensor) -> Tensor:
    return onednn.gelu_overwriting_grad(x)
