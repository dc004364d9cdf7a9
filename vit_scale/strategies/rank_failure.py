"""A rank died or hangs: report it and exit, so that all ranks can be restarted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from vit_scale.checkpoints.find import list_checkpoints, step_of
from vit_scale.launcher import world_size

RANK_FAILURE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: worth retrying."""


def is_rank_failure(error: RuntimeError) -> bool:
    """Return whether a collective raised `error`; gloo raises plain `RuntimeError`s, recognizable by their message."""
    return world_size() > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error))


def report_rank_failure(error: RuntimeError, run_dir: Path | None, timeout_seconds: int) -> None:
    """Print what happened and how to resume, from every remaining rank."""
    saved = list_checkpoints(run_dir / "checkpoints") if run_dir is not None else []
    purpose = f"resume after step {step_of(saved[-1]):,}" if saved else "start again"
    print(
        f"error: rank {os.environ['RANK']} of {world_size()}: another rank exited or did not respond within "
        f"parallel.timeout_seconds = {timeout_seconds}: {_reason(error)}.\n"
        f"Rerun the same command to {purpose}, or use torchrun --max-restarts 3 or "
        "accelerate launch --max_restarts 3 to restart automatically.",
        file=sys.stderr,
        flush=True,
    )


def exit_immediately() -> NoReturn:
    """Exit without cleanup: a communicator may wait for the failed rank indefinitely."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(RANK_FAILURE_EXIT_CODE)


def _reason(error: RuntimeError) -> str:
    """Return the first sentence, without the location in the library's source."""
    return str(error).split("] ", 1)[-1].split(". ")[0].splitlines()[0].rstrip(".")
