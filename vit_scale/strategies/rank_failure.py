"""One of several processes died or hangs: say so and end, so that all can be started anew."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from vit_scale.checkpoints.writer import list_checkpoints, step_of
from vit_scale.launcher import world_size

LOST_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: worth another try."""


def is_lost_process(error: RuntimeError) -> bool:
    """Whether `error` is that of a collective: gloo raises plain `RuntimeError`s and is known by its message only."""
    return world_size() > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error))


def tell_of_loss(error: RuntimeError, folder: Path | None, timeout_seconds: int) -> None:
    """What happened and how to go on, from every process that is left."""
    saved = list_checkpoints(folder / "checkpoints") if folder is not None else []
    start = f"goes on after step {step_of(saved[-1]):,}" if saved else "starts anew"
    print(
        f"error: process {os.environ['RANK']} of {world_size()} lost another one, which ended or did not answer "
        f"for parallel.timeout_seconds = {timeout_seconds}: {_reason(error)}.\n"
        f"The same command {start}. torchrun --max-restarts 3 and accelerate launch --max_restarts 3 do so unasked.",
        file=sys.stderr,
        flush=True,
    )


def leave_at_once() -> NoReturn:
    """End without the usual farewells: a communicator may wait for the lost process for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(LOST_STATUS)


def _reason(error: RuntimeError) -> str:
    """The first sentence, without the place in the library's sources."""
    return str(error).split("] ", 1)[-1].split(". ")[0].splitlines()[0].rstrip(".")
