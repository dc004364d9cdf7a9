"""Attention on a CPU by the kernel in cpu_attention.c, where that was built and is worthwhile.

Shapes: B batch, N tokens, D token width, H heads.
"""

import ctypes
import functools
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vit_scale.kernels import cpu

WIDTHS = 16
"""The width of a head must be a multiple of that."""
_FORWARD = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 4 + [ctypes.c_int]
_BACKWARD = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 4 + [ctypes.c_int]


def is_built() -> bool:
    """Whether there is a kernel for this CPU."""
    return _library() is not None


def runs(x_BND: Tensor, heads: int) -> bool:
    """Whether attention of these tokens to each other can be left to `attend`."""
    _, tokens, dim = x_BND.shape
    return cpu.is_worth_a_product(x_BND, 2 * tokens) and dim % (heads * WIDTHS) == 0 and is_built()


def attend(qkv_BNC: Tensor, heads: int) -> Tensor:
    """Each query's average of the values, [B, N, D], from queries, keys and values side by side, [B, N, 3 D]."""
    channels = qkv_BNC.shape[-1]
    if qkv_BNC.device.type != "cpu" or qkv_BNC.dtype != torch.float32 or channels % (3 * heads * WIDTHS) != 0:
        raise ValueError(
            f"the kernel takes numbers of float32 on a CPU, in heads of a multiple of {WIDTHS}; "
            f"these are {channels} channels for {heads} heads, of {qkv_BNC.dtype} on {qkv_BNC.device}"
        )
    return _Attention.apply(qkv_BNC, heads)


class _Attention(torch.autograd.Function):
    """Keeps the result and a number for each query, as flash attention does, and computes the weights again."""

    @staticmethod
    def forward(ctx: Any, qkv_BNC: Tensor, heads: int) -> Tensor:
        qkv_BNC = qkv_BNC.contiguous()
        images, tokens, channels = qkv_BNC.shape
        y_BND = qkv_BNC.new_empty(images, tokens, channels // 3)
        log_sums_BHN = qkv_BNC.new_empty(images, heads, tokens)
        _call(_library().attention_forward, y_BND.shape, heads, qkv_BNC, y_BND, log_sums_BHN)
        ctx.save_for_backward(qkv_BNC, y_BND, log_sums_BHN)
        ctx.heads = heads
        return y_BND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BND: Tensor) -> tuple[Tensor, None]:
        qkv_BNC, y_BND, log_sums_BHN = ctx.saved_tensors
        grad_BNC = torch.empty_like(qkv_BNC)
        tensors = grad_BND.contiguous(), qkv_BNC, y_BND, log_sums_BHN, grad_BNC
        _call(_library().attention_backward, y_BND.shape, ctx.heads, *tensors)
        return grad_BNC, None


def _call(function: Any, shape: torch.Size, heads: int, *tensors: Tensor) -> None:
    images, tokens, dim = shape
    pointers = [tensor.data_ptr() for tensor in tensors]
    if function(*pointers, images, tokens, heads, dim // heads, torch.get_num_threads()):
        raise MemoryError("no memory for the attention of a head")


@functools.cache
def _library() -> Any:
    """What setup.py built for this CPU; None where it did not, for want of a compiler or of such a CPU."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = Path(__file__).with_name(f"cpu_attention_{cpu.vectors().lower()}{suffix}")
    if not path.exists():
        return None
    try:
        # It is not linked with OpenMP: its threads are those of torch, whose library is loaded by now.
        library = ctypes.CDLL(str(path))
    except OSError as error:
        warnings.warn(f"The attention kernel for CPUs cannot be loaded, torch's is used: {error}", stacklevel=2)
        return None
    library.attention_forward.argtypes = _FORWARD
    library.attention_backward.argtypes = _BACKWARD
    return library
