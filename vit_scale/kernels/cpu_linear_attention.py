"""Linear attention on a CPU by the kernel in cpu_linear_attention.c, if it was built and pays off.

Shapes: B batch, N tokens, Q leading tokens with a query, D token width, H heads, K head width, M random features.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vit_scale.kernels import cpu
from vit_scale.kernels.cpu_attention import WIDTHS, load_library

_SIZES = [ctypes.c_long, ctypes.c_float] + [ctypes.c_long] * 5 + [ctypes.c_int]
_ARGUMENTS = {
    "linear_attention_forward": [ctypes.c_void_p] * 3 + _SIZES,
    "linear_attention_backward": [ctypes.c_void_p] * 5 + _SIZES,
}


def runs(x_BND: Tensor, heads: int, features: int) -> bool:
    """Return whether `attend` can compute the attention of these tokens, and pays off."""
    if not cpu.use_custom_matmul(x_BND, 2 * features) or x_BND.shape[-1] % (heads * WIDTHS) != 0:
        return False
    return is_built()


def is_built() -> bool:
    """Return whether this CPU has the kernel."""
    # A library that an earlier version built has no such function.
    return hasattr(load_library(), "linear_attention_backward")


def attend(qkv_BNC: Tensor, heads: int, directions_MK: Tensor, epsilon: float, queries: int | None = None) -> Tensor:
    """Return linear attention of the leading `queries`, [B, Q, D], of packed queries, keys and values, [B, N, 3 D].

    Differentiable once, with respect to `qkv_BNC`.
    """
    channels, width = qkv_BNC.shape[-1], directions_MK.shape[1]
    is_plain = qkv_BNC.device.type == "cpu" and qkv_BNC.dtype == directions_MK.dtype == torch.float32
    if not is_plain or channels != 3 * heads * width or width % WIDTHS:
        raise ValueError(
            f"the kernel expects float32 on a CPU and a head width that is a multiple of {WIDTHS}; got {channels} "
            f"channels for {heads} heads of {width}, {qkv_BNC.dtype} on {qkv_BNC.device}"
        )
    return _LinearAttention.apply(qkv_BNC, heads, directions_MK.contiguous(), epsilon, queries or qkv_BNC.shape[1])


class _LinearAttention(torch.autograd.Function):
    """Save neither features nor sums: the backward pass computes them again."""

    @staticmethod
    def forward(ctx: Any, qkv_BNC: Tensor, heads: int, directions_MK: Tensor, epsilon: float, queries: int) -> Tensor:
        qkv_BNC = qkv_BNC.contiguous()
        y_BQD = qkv_BNC.new_empty(qkv_BNC.shape[0], queries, qkv_BNC.shape[2] // 3)
        _call("linear_attention_forward", (qkv_BNC, directions_MK, y_BQD), qkv_BNC, directions_MK, epsilon, queries)
        ctx.save_for_backward(qkv_BNC, directions_MK, y_BQD)
        ctx.epsilon = epsilon
        return y_BQD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BQD: Tensor) -> tuple[Tensor, None, None, None, None]:
        qkv_BNC, directions_MK, y_BQD = ctx.saved_tensors
        grad_BNC = torch.empty_like(qkv_BNC)
        tensors = grad_BQD.contiguous(), qkv_BNC, directions_MK, y_BQD, grad_BNC
        _call("linear_attention_backward", tensors, qkv_BNC, directions_MK, ctx.epsilon, y_BQD.shape[1])
        return grad_BNC, None, None, None, None


def _call(
    name: str, tensors: tuple[Tensor, ...], qkv_BNC: Tensor, directions_MK: Tensor, epsilon: float, queries: int
) -> None:
    images, tokens, channels = qkv_BNC.shape
    features, width = directions_MK.shape
    function = getattr(load_library(), name)
    function.argtypes = _ARGUMENTS[name]
    sizes = images, queries, tokens, channels // (3 * width), width, torch.get_num_threads()
    if function(*(tensor.data_ptr() for tensor in tensors), features, epsilon, *sizes):
        raise MemoryError("no memory for the attention of a head")
