"""Freed memory is retained."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from vit_scale.kernels.malloc import retain_freed_memory

size, include_large = int(sys.argv[1]), sys.argv[2] == "True"

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        [np.ones(size, np.uint8) for _ in range(6)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
assert retain_freed_memory(include_large=not include_large)
assert retain_freed_memory(include_large=include_large)  # The last call takes effect.
faults()
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize(("size", "include_large"), [(300_000, False), (300_000, True), (40_000_000, True)])
def test_arrays_reuse_freed_pages(size: int, include_large: bool) -> None:
    command = [sys.executable, "-c", FAULTS, str(size), str(include_large)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    before, after = map(int, done.stdout.split())
    assert after < 100
    assert before > 10 * after


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_blocks_larger_than_32_mb_are_returned_to_the_system_by_default() -> None:
    command = [sys.executable, "-c", FAULTS, "40000000", "False"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    before, after = map(int, done.stdout.split())
    assert after > before / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_other_threads_can_allocate_blocks_larger_than_their_arena() -> None:
    code = """
import threading
import numpy as np
from vit_scale.kernels.malloc import retain_freed_memory

assert retain_freed_memory(include_large=True)
sums = []
threads = [threading.Thread(target=lambda: sums.append(int(np.ones(200_000_000, np.uint8).sum()))) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sums)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str([200_000_000] * 3)
