"""`launch/train.py` in processes that start immediately: children of a forkserver that has imported the libraries.

Each child is a separate process with its own group, signals, limits and exit status; only the imports are shared.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import signal
import sys

import accelerate  # noqa: F401
import timm  # noqa: F401

import vit_scale.train.finish  # noqa: F401
from vit_scale.tasks.classify.classification import Classification
from vit_scale.train import loop


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
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # for data-loading workers, as in a process started by hand
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ.update(environment)
    if largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if poison_from is not None:
        poison(poison_from)
    sys.argv = ["launch/train.py", *arguments]
    runpy.run_path("launch/train.py", run_name="__main__")


def poison(first_step: int) -> None:
    """Make every loss NaN from `first_step` on."""
    update, loss = loop.update, Classification.loss

    def poisoned_loss(task, outputs, inputs):  # type: ignore[no-untyped-def]
        return {name: part * float("nan") for name, part in loss(task, outputs, inputs).items()}

    def poisoned_update(task, state, batches, **options):  # type: ignore[no-untyped-def]
        Classification.loss = poisoned_loss if state.step >= first_step else loss
        return update(task, state, batches, **options)

    loop.update = poisoned_update
