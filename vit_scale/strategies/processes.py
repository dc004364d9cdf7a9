"""The processes that a launcher started: join, agree, wait and leave."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vit_scale.errors import UserError
from vit_scale.launcher import is_main_process, world_size

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among all processes, and its device."""

    device: torch.device
    rank: int
    world: int

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0


def join_processes() -> Processes:
    """Join the other processes, if any, for work without an optimizer: over NCCL with GPUs, otherwise gloo."""
    world = world_size()
    has_gpu = torch.cuda.is_available()
    if world == 1:
        return Processes(torch.device("cuda" if has_gpu else "cpu"), 0, 1)
    from accelerate import PartialState

    state = PartialState(cpu=not has_gpu, backend="nccl" if has_gpu else "gloo")
    return Processes(state.device, state.process_index, state.num_processes)


def own_device() -> torch.device:
    """Return the device of this process; a GPU becomes torch's current one.

    Otherwise whatever uses the current device would allocate memory on GPU 0 from every process of the node.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise UserError(f"LOCAL_RANK = {index}: only {count} GPUs are visible; start at most one process per GPU")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def own_cores() -> int:
    """Return the number of CPU cores for this process: its share of those that it may use; all ranks must call it.

    Slurm usually gives each task cores of its own, while processes of torchrun or accelerate share those of the node.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    node = (socket.gethostname(), os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID")))
    everyone = [(node, cores)]
    if world_size() > 1:
        everyone *= world_size()
        dist.all_gather_object(everyone, (node, cores))
    return share_of_cores(cores, [theirs for where, theirs in everyone if where == node])


def share_of_cores(cores: set[int], processes: list[set[int]]) -> int:
    """Return how many of `cores` are left if each is divided evenly between the `processes` that may use it."""
    share = sum(1 / sum(core in theirs for theirs in processes) for core in cores)
    return max(1, int(share + 1e-6))


def call_on_main(decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0 only; return its result, or raise its exception, on every rank."""
    if world_size() == 1:
        return decide()
    outcome: list[Any] = [None]
    if is_main_process():
        try:
            outcome = [(decide(), None)]
        except Exception as error:  # noqa: BLE001 -- the other ranks must not wait for it
            outcome = [(None, error)]
    dist.broadcast_object_list(outcome)
    result, raised = outcome[0]
    if raised is not None:
        raise raised
    return result


def wait_for_all() -> None:
    """Return when every rank has called it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def close_processes() -> None:
    """Leave the process group, if any, so that no process warns about the exit of another."""
    if dist.is_initialized():
        dist.destroy_process_group()


def init_group_after_restart(timeout_seconds: float) -> None:
    """Initialize the process group under a store prefix that earlier attempts have not used.

    torch's launcher keeps one store of addresses over restarts (pytorch/pytorch#135712), so a restarted process may
    read the address of a dead one there and wait for it indefinitely.

    Does nothing in the first attempt: accelerate or DeepSpeed then initializes the group. Later they use this one.
    """
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not (restart and shared) or dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    device = own_device()
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"restart-{restart}", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )


@contextmanager
def restored_process(*, keep_group: bool = False) -> Iterator[None]:
    """Undo what accelerate and DeepSpeed change in this process, so that its next run may use another strategy.

    These are environment variables, accelerate's global state, `torch.nn.functional.linear`, which ZeRO-3 replaces, and
    the process group of a single process under ZeRO. The group of several processes stays: their launcher belongs to
    all runs. `keep_group`: that of a single one stays too, which DeepSpeed needs for another run, since it refers to
    its first group for the life of the process.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    environment, linear = dict(os.environ), torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear  # type: ignore[assignment]
        os.environ.clear()
        os.environ.update(environment)
        if world_size() == 1 and not keep_group:
            close_processes()
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
