"""A script in processes that start immediately: children of a forkserver that has imported the libraries.

Each child is a separate process with its own group, signals, limits and exit status; only the imports are shared.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import sys
from pathlib import Path

M_MMAP_THRESHOLD = -3
LIBRARIES = ["accelerate", "timm", "datasets", "sklearn.datasets", "vit_scale.train.finish"]
LIBRARIES += ["deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"]  # which compiles a function


def run(script: str, arguments: list[str], environment: dict[str, str], outputs: tuple[str, str]) -> None:
    """Run `script` as `python script` would; its output and errors are appended to the files `outputs`."""
    import torch

    gc.freeze()  # Otherwise each collection would go through a million objects of the libraries.
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # for data-loading workers, as in a process started by hand
    for stream, output in zip((sys.stdout, sys.stderr), outputs, strict=True):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    if threshold := environment.get("MALLOC_MMAP_THRESHOLD_"):  # read when the forkserver started, like the next
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(threshold))
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def train(
    arguments: list[str],
    environment: dict[str, str],
    output: str,
    largest_file: int | None = None,
    poison_from: int | None = None,
) -> None:
    """Run `launch/train.py` with `arguments`; its output goes to the file `output`.

    `largest_file`: maximum bytes per file. `poison_from`: the loss is NaN from this step on.
    """
    if largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if poison_from is not None:
        poison(poison_from)
    run("launch/train.py", arguments, environment, (output, output))


def poison(first_step: int) -> None:
    """Make every loss NaN from `first_step` on."""
    from vit_scale.tasks.classify.classification import Classification
    from vit_scale.train import loop

    update, loss = loop.update, Classification.loss

    def poisoned_loss(task, outputs, inputs):  # type: ignore[no-untyped-def]
        return {name: part * float("nan") for name, part in loss(task, outputs, inputs).items()}

    def poisoned_update(task, state, batches, **options):  # type: ignore[no-untyped-def]
        Classification.loss = poisoned_loss if state.step >= first_step else loss
        return update(task, state, batches, **options)

    loop.update = poisoned_update
