"""Disks: where runs are written, and the shared memory of data-loading workers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vit_scale.checkpoints import run_lock
from vit_scale.doctor.check import Check, Setup, broken, skipped, slow, works
from vit_scale.format import duration, memory_size

SLOW_BYTES_PER_SECOND = 100e6
CHECKPOINT_BYTES = 304_326_632 * 16
"""ViT-L/16 with AdamW and EMA in fp32."""
MIN_FREE, ENOUGH_FREE = 1e9, 20e9
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- not a temporary file
MIN_SHARED, ENOUGH_SHARED = 2**27, 2**31
"""Containers have 64 MiB by default; a worker that runs out of shared memory dies with a bus error."""


def checkpoints(setup: Setup) -> Check:
    """Write a file to the directory of runs, flush it to the disk, and read it back."""
    name, size = "checkpoint disk", (2**24 if setup.quick else 2**28)
    block = os.urandom(2**22)
    try:
        with tempfile.NamedTemporaryFile(dir=setup.run_dir, prefix=".vit_scale-doctor-") as file:
            start = time.perf_counter()
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = size / (time.perf_counter() - start)
            file.seek(0)
            same = all(file.read(len(block)) == block for _ in range(size // len(block)))
    except OSError as error:
        return broken(name, f"cannot write to the run directory: {error.strerror}", "choose another one with --dir")
    if not same:
        return broken(name, "a file is read back with other contents", "do not store anything on this disk")
    value = f"{rate / 1e6:,.0f} MB/s written; a checkpoint of ViT-L/16 takes {duration(CHECKPOINT_BYTES / rate)}"
    if rate < SLOW_BYTES_PER_SECOND:
        advice = "training waits if a checkpoint takes longer than run.save_every steps: use a faster disk with run.dir"
        return slow(name, value, advice, bytes_per_second=rate)
    return works(name, value, bytes_per_second=rate)


def free_space(setup: Setup) -> Check:
    """Check that a few checkpoints fit."""
    free = shutil.disk_usage(setup.run_dir).free
    value, advice = f"{memory_size(free)} free for runs", "free some, or write to another disk with run.dir"
    if free < MIN_FREE:
        return broken("free disk", value, advice, bytes=free)
    if free < ENOUGH_FREE:
        needed = f"three checkpoints of ViT-L/16 take {memory_size(3 * CHECKPOINT_BYTES)}"
        return slow("free disk", f"{value}; {needed}", advice, bytes=free)
    return works("free disk", value, bytes=free)


def locks(setup: Setup) -> Check:
    """Check that the lock of a run directory keeps another process out."""
    if run_lock.fcntl is None:
        return skipped("run lock", "no file locks on this system")
    with tempfile.TemporaryDirectory(dir=setup.run_dir, prefix=".vit_scale-doctor-") as folder:
        run_lock.acquire(Path(folder))
        asked = subprocess.run([sys.executable, "-c", _ASK, folder], capture_output=True, text=True, check=True)
        run_lock.release(Path(folder))
    if asked.stdout.strip() != "True":
        advice = "never start two runs in one directory: this file system has no locks"
        return broken("run lock", "two processes get the same lock", advice, required=False)
    return works("run lock", "a run directory is locked for other processes")


_ASK = """
import pathlib, sys
from vit_scale.checkpoints.run_lock import is_in_use

print(is_in_use(pathlib.Path(sys.argv[1])))
"""


def shared_memory(setup: Setup) -> Check:
    """Check the space in which workers pass batches."""
    if not SHARED_MEMORY.is_dir():
        return skipped("shared memory", f"no {SHARED_MEMORY} on this system")
    free = shutil.disk_usage(SHARED_MEMORY).free
    value = f"{memory_size(free)} free in {SHARED_MEMORY}"
    advice = "start the container with --shm-size=8g or --ipc=host, or set data.workers=0"
    if free < MIN_SHARED:
        return broken("shared memory", f"{value}: workers would die with a bus error", advice, bytes=free)
    if free < ENOUGH_SHARED:
        return slow("shared memory", f"{value}: few workers fit", advice, bytes=free)
    return works("shared memory", value, bytes=free)
