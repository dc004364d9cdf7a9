"""Attention on a CPU by the kernel in cpu_attention.c, if it was built and pays off.

Shapes: B batch, N tokens, D token width, H heads.
"""

import ctypes
import functools
import itertools
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vit_scale.kernels import cpu

WIDTHS = 16
"""The head width must be a multiple of this."""
_FORWARD = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 4 + [ctypes.c_int]
_BACKWARD = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 4 + [ctypes.c_int]
_GROUPS = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 2


class Groups(NamedTuple):
    """Tokens after the first `prefix` in groups; group g is `members[starts[g] : starts[g + 1]]`."""

    members: Any
    """Token indices, an array of C integers."""
    starts: Any
    """One more than there are groups."""
    prefix: int


def groups_of(groups: Sequence[Sequence[int]], prefix: int) -> Groups:
    """Return groups of patches, numbered after `prefix` tokens, in the form that the kernel reads."""
    members = [patch + prefix for group in groups for patch in group]
    starts = [0, *itertools.accumulate(map(len, groups))]
    # Not tensors: these are made once, and there is no mode in which a tensor would be of another kind.
    return Groups((ctypes.c_int * len(members))(*members), (ctypes.c_int * len(starts))(*starts), prefix)


def is_built() -> bool:
    """Return whether there is a kernel for this CPU."""
    return _library() is not None


def runs(x_BND: Tensor, heads: int, groups: Groups | None = None) -> bool:
    """Return whether `attend` can compute the attention of these tokens to each other, and pays off."""
    _, tokens, dim = x_BND.shape
    # Also for groups: it saves the copies that torch's kernels need for them.
    if not cpu.use_custom_matmul(x_BND, 2 * tokens) or dim % (heads * WIDTHS) != 0:
        return False
    return is_built() if groups is None else runs_groups()


def attend(qkv_BNC: Tensor, heads: int, groups: Groups | None = None) -> Tensor:
    """Return softmax attention, [B, N, D], of packed queries, keys and values, [B, N, 3 D]; differentiable once.

    With `groups`, a token attends to the prefix and its group, and a prefix token to all tokens.
    """
    channels = qkv_BNC.shape[-1]
    if qkv_BNC.device.type != "cpu" or qkv_BNC.dtype != torch.float32 or channels % (3 * heads * WIDTHS) != 0:
        raise ValueError(
            f"the kernel expects float32 on a CPU and a head width that is a multiple of {WIDTHS}; "
            f"got {channels} channels for {heads} heads, {qkv_BNC.dtype} on {qkv_BNC.device}"
        )
    if groups is not None and groups.prefix + len(groups.members) != qkv_BNC.shape[1]:
        raise ValueError(f"{groups.prefix} prefix tokens and {len(groups.members)} in groups are not all tokens")
    return _Attention.apply(qkv_BNC, heads, groups)


class _Attention(torch.autograd.Function):
    """Save the output and one number per query, as flash attention does, and recompute the weights."""

    @staticmethod
    def forward(ctx: Any, qkv_BNC: Tensor, heads: int, groups: Groups | None) -> Tensor:
        qkv_BNC = qkv_BNC.contiguous()
        images, tokens, channels = qkv_BNC.shape
        y_BND = qkv_BNC.new_empty(images, tokens, channels // 3)
        log_sums_BHN = qkv_BNC.new_empty(images, heads, tokens)
        _call("attention_forward", y_BND.shape, heads, groups, qkv_BNC, y_BND, log_sums_BHN)
        ctx.save_for_backward(qkv_BNC, y_BND, log_sums_BHN)
        ctx.heads, ctx.groups = heads, groups
        return y_BND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BND: Tensor) -> tuple[Tensor, None, None]:
        qkv_BNC, y_BND, log_sums_BHN = ctx.saved_tensors
        grad_BNC = torch.empty_like(qkv_BNC)
        tensors = grad_BND.contiguous(), qkv_BNC, y_BND, log_sums_BHN, grad_BNC
        _call("attention_backward", y_BND.shape, ctx.heads, ctx.groups, *tensors)
        return grad_BNC, None, None


def _call(name: str, shape: torch.Size, heads: int, groups: Groups | None, *tensors: Tensor) -> None:
    images, tokens, dim = shape
    arguments: list[Any] = [tensor.data_ptr() for tensor in tensors]
    if groups is not None:
        name = f"grouped_{name}"
        arguments += [groups.members, groups.starts, len(groups.starts) - 1, groups.prefix]
    if getattr(_library(), name)(*arguments, images, tokens, heads, dim // heads, torch.get_num_threads()):
        raise MemoryError("no memory for the attention of a head")


def load_library() -> Any:
    """Return the library with all attention kernels; None if it was not built."""
    return _library()


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
    if has_groups(library):
        library.grouped_attention_forward.argtypes = _FORWARD[:3] + _GROUPS + _FORWARD[3:]
        library.grouped_attention_backward.argtypes = _BACKWARD[:5] + _GROUPS + _BACKWARD[5:]
    return library


def runs_groups() -> bool:
    """Return whether this CPU has the kernel for attention within groups."""
    return is_built() and has_groups(_library())


def has_groups(library: Any) -> bool:
    """Return whether the library has the functions for groups; one that an earlier version built has not."""
    return hasattr(library, "grouped_attention_backward")
