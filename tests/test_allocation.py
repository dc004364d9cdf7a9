"""Freed memory that is kept."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from vit_scale.allocation import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        [np.ones(300_000, np.uint8) for _ in range(6)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
assert keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_arrays_take_the_pages_of_those_before() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=60, check=True)
    before, after = map(int, done.stdout.split())
    assert after < 100
    assert before > 10 * after
