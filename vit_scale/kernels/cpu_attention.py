"""Attention on a CPU by the kernel in cpu_attention.c, if it was built and pays off.

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
"""The head width must be a multiple of this."""
_FORWARD = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 4 + [ctypes.c_int]
_BACKWARD = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 4 + [ctypes.c_int]


def is_built() -> bool:
    """Return whether there is a kernel for this CPU."""
    return _library() is not None


def runs(x_BND: Tensor, heads: int) -> bool:
    """Return whether `attend` can compute the attention of these tokens to each other, and pays off."""
    _, tokens, dim = x_BND.shape
    return cpu.use_custom_matmul(x_BND, 2 * tokens) and dim % (heads * WIDTHS) == 0 and is_built()


def attend(qkv_BNC: Tensor, heads: int) -> Tensor:
    """Return softmax attention, [B, N, D], of packed queries, keys and values, [B, N, 3 D]; differentiable once."""
    channels = qkv_BNC.shape[-1]
    if qkv_BNC.device.type != "cpu" or qkv_BNC.dtype != torch.float32 or channels % (3 * heads * WIDTHS) != 0:
        raise ValueError(
            f"the kernel expects float32 on a CPU and a head width that is a multiple of {WIDTHS}; "
            f"got {channels} channels for {heads} heads, {qkv_BNC.dtype} on {qkv_BNC.device}"
        )
    return _Attention.apply(qkv_BNC, heads)


class _Attention(torch.autograd.Function):
    """Save the output and one number per query, as flash attention does, and recompute the weights."""

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
    """Load the kernel that setup.py built for this CPU; None if there was no compiler or no such CPU."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = Path(__file__).with_name(f"cpu_attention_{cpu.vectors().lower()}{suffix}")
    if not path.exists():
        return None
    try:
        # Not linked with OpenMP: it uses torch's threads, whose library is already loaded.
        library = ctypes.CDLL(str(path))
    except OSError as error:
        warnings.warn(f"Cannot load the CPU attention kernel, using torch's: {error}", stacklevel=2)
        return None
    library.attention_forward.argtypes = _FORWARD
    library.attention_backward.argtypes = _BACKWARD
    return library
