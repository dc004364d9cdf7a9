"""Finding the other processes again after a launcher with `--max_restarts` has started all of them anew.

torch's launcher keeps one store of addresses over restarts (pytorch/pytorch#135712), so a restarted process may read
the address of a dead one there and wait for it for ever.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def rejoin_after_restart(timeout_seconds: float) -> None:
    """Start the process group in a part of the store that earlier attempts have not written to.

    Does nothing in a first attempt; accelerate and DeepSpeed then start the group, and else use the one they find.
    """
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not (restart and shared) or dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        backend="nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore(f"restart-{restart}", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
