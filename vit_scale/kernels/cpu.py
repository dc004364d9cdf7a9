"""When a CPU computes in another way than torch's, and what sort of CPU it is."""

import functools
import os
from pathlib import Path

import torch
from torch import Tensor

WORTHWHILE_MACS = 2**25
WORTHWHILE_ELEMENTS = 2**18
"""Less than that takes less time than the Python around it."""


def is_worth_a_product(x: Tensor, macs_of_an_element: int) -> bool:
    """Whether products of `x`, which multiply each element so often, go to the libraries and kernels of our choice."""
    return _is_plain_fp32(x) and x.numel() * macs_of_an_element >= WORTHWHILE_MACS


def is_worth_a_pass(x: Tensor) -> bool:
    """The same of work on each element of `x`."""
    return _is_plain_fp32(x) and x.numel() >= WORTHWHILE_ELEMENTS


def _is_plain_fp32(x: Tensor) -> bool:
    """Not autocast's, nor a compiler's, an exporter's or a counter's stand-in of a tensor, which has no size to ask.

    Nor one that torch.func transforms or torch.jit traces. A counter that watches real tensors sees torch's work only.
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
    )


@functools.cache
def vectors() -> str:
    """The widest that this CPU has and torch uses: `AVX512`, `AVX2` or another word."""
    return torch.backends.cpu.get_cpu_capability()


@functools.cache
def is_intel() -> bool:
    """Whether Intel made it, for whose CPUs MKL is written."""
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
