"""The processes that a launcher started, for work that has no optimiser."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """This process among the others, and its device."""

    device: torch.device
    rank: int
    world: int
    here: int
    """Processes on this machine."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def join_processes() -> Processes:
    """Join the others, if there are any: NCCL where there are GPUs, else gloo."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    has_gpu = torch.cuda.is_available()
    if world == 1:
        return Processes(torch.device("cuda" if has_gpu else "cpu"), 0, 1, 1)
    from accelerate import PartialState

    state = PartialState(cpu=not has_gpu, backend="nccl" if has_gpu else "gloo")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return Processes(state.device, state.process_index, state.num_processes, here)


def close_processes() -> None:
    """Leave the group, if there is one, so that no process warns of the others' end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rejoin_after_restart(timeout_seconds: float) -> None:
    """Start the process group in a part of the store that earlier attempts have not written to.

    torch's launcher keeps one store of addresses over restarts (pytorch/pytorch#135712), so a restarted process may
    read the address of a dead one there and wait for it indefinitely.

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


def wait_for_all() -> None:
    """Wait until every process has arrived here, if there are several."""
    if dist.is_initialized():
        dist.barrier()


def reset_accelerate() -> None:
    """Forget accelerate's global state, so that another run of this process may choose another strategy."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
