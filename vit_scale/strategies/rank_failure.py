"""One rank fails: report the error once, from the rank that met it, and let all exit, so that they can be restarted.

The ranks tell each other through the store of the process group, which works while collectives do not.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from vit_scale.checkpoints.find import list_checkpoints, step_of
from vit_scale.errors import RankError, UserError
from vit_scale.launcher import world_size

RANK_FAILURE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: worth retrying."""

_PATIENCE_SECONDS = 3.0
"""How long a rank with an error waits for another one with the same error."""
_FAILED = "failed"


_reported = itertools.count()


@contextmanager
def errors_of_ranks(*, expected: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Turn a `UserError` inside into a `RankError`, which names the rank, unless all ranks raise it.

    The other ranks are notified, also of a crash, and then do not report the loss of this one. `expected` is not an
    error.
    """
    try:
        yield
    except expected:
        raise
    except UserError as error:
        if world_size() == 1 or _is_raised_by_all(str(error)):
            raise
        raise RankError(f"rank {os.environ['RANK']} of {world_size()}: {error}") from error
    except Exception as error:
        if world_size() > 1 and not (isinstance(error, RuntimeError) and is_rank_failure(error)):
            print(f"error: rank {os.environ['RANK']} of {world_size()} failed:", file=sys.stderr, flush=True)
            _ask_store(lambda store: store.set(_FAILED, ""))
        raise


def _is_raised_by_all(message: str) -> bool:
    rank = int(os.environ["RANK"])
    if not dist.is_initialized():
        # Nobody can be asked yet. All ranks of a node read the same files, so its first one reports for all.
        return rank == 0 or os.environ.get("LOCAL_RANK", "0") != "0"

    number = next(_reported)  # One process may train several runs.
    own, other = f"{number}/{rank}", f"{number}/{1 if rank == 0 else 0}"
    deadline = time.monotonic() + _PATIENCE_SECONDS

    def ask(store: dist.Store) -> bool:
        store.set(own, message)
        try:
            # Not `wait`: torch would log a warning about its timeout.
            while not (is_known := store.check([other])) and time.monotonic() < deadline:
                time.sleep(0.02)
            if is_known and store.get(other) == message.encode():
                return True
        except RuntimeError:
            return True  # The process with the store is gone: rank 0, which has printed its error.
        store.set(_FAILED, "")
        return False

    return _ask_store(ask) or False


def _ask_store(ask: Callable[[dist.Store], bool | None]) -> bool | None:
    """Return `ask(store)`; None if the store does not answer, as its process may be the one that failed."""
    answer: list[bool | None] = [None]

    def work() -> None:
        with suppress(RuntimeError, ValueError):
            answer[0] = ask(dist.PrefixStore("errors", dist.distributed_c10d._get_default_store()))

    if dist.is_initialized():
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(2 * _PATIENCE_SECONDS)
    return answer[0]


def is_rank_failure(error: RuntimeError) -> bool:
    """Return whether a collective raised `error`; gloo raises plain `RuntimeError`s, recognizable by their message."""
    return world_size() > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error))


def report_rank_failure(error: RuntimeError, run_dir: Path | None, timeout_seconds: int) -> None:
    """Print what happened and how to resume, from every remaining rank, unless the failed one has reported it."""
    if _ask_store(lambda store: store.check([_FAILED])):
        return
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
