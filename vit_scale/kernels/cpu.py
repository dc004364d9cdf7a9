"""Decide when custom CPU code pays off, and detect the kind of CPU."""

import functools
import os
from pathlib import Path

import torch
from torch import Tensor

from vit_scale.kernels import enabled

WORTHWHILE_MACS = 2**25
WORTHWHILE_ELEMENTS = 2**18
"""Less work than this takes less time than the Python code around it."""


def use_custom_matmul(x: Tensor, macs_per_element: int) -> bool:
    """Return whether matmuls that multiply each element of `x` this often go to our kernels and libraries."""
    return _is_plain_fp32(x) and x.numel() * macs_per_element >= WORTHWHILE_MACS


def use_custom_elementwise(x: Tensor) -> bool:
    """Return whether elementwise work on `x` goes to our kernels."""
    return _is_plain_fp32(x) and x.numel() >= WORTHWHILE_ELEMENTS


def _is_plain_fp32(x: Tensor) -> bool:
    """Return False under autocast, for fake tensors of a compiler, exporter or counter, and for those of torch.func.

    Fake tensors have no data, and torch.jit traces only torch's own operations.
    """
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and torch.backends.mkldnn.is_available()
        and enabled()
    )


@functools.cache
def vectors() -> str:
    """Return the widest vectors that this CPU has and torch uses: `AVX512`, `AVX2` or another name."""
    return torch.backends.cpu.get_cpu_capability()


@functools.cache
def is_intel() -> bool:
    """Return whether this is an Intel CPU, for which MKL is written."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


# Below this a second thread gains little on an idle CPU, and on a busy one each of the many short parallel regions
# waits for the thread that was descheduled: measured 7 times slower on two cores with other work on them.
MIN_FLOPS_FOR_THREADS = 5e9


def limit_threads(flops: float) -> None:
    """Use one thread if a forward and backward pass takes few `flops`, unless the user has chosen a number."""
    if flops < MIN_FLOPS_FOR_THREADS and not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
