"""The processes that a launcher started, for work that has no optimiser."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


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


def leave_processes() -> None:
    """Leave the group, if there is one, so that no process warns of the others' end."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
