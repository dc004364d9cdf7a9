"""Collectives between the GPUs of this machine (NCCL), or between two processes (gloo): right, and how fast.

Every function here runs on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vit_scale.doctor.check import Check, Setup, broken, skipped, slow, works
from vit_scale.strategies.processes import Processes, join_processes

SLOW_BYTES_PER_SECOND = {"cuda": 5e9, "cpu": 0.05e9}
"""PCIe 3.0 x16 gives more than 5 GB/s, loopback more than 0.1 GB/s."""
ADVICE = "run with NCCL_DEBUG=INFO to see the transport; try NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1"
CPU_ADVICE = "check firewall and GLOO_SOCKET_IFNAME: processes of this machine cannot talk to each other"


def all_reduce(setup: Setup) -> Check:
    """Sum gradients over ranks, as DDP does."""
    if setup.gpus == 1:
        return skipped("all-reduce", "one GPU")
    here = join_processes()
    megabytes = (256 if setup.gpus else 32) // (8 if setup.quick else 1)
    values = torch.full((megabytes * 2**18,), float(here.rank + 1), device=here.device)
    dist.all_reduce(values)
    expected = here.world * (here.world + 1) / 2
    if problem := _wrong_on_any_rank(values, expected, here):
        return broken("all-reduce", problem, _advice(setup))
    seconds = _seconds(lambda: dist.all_reduce(values), here)
    # Each byte is sent and received (n - 1) / n times in the reduction, and again in the distribution.
    rate = 2 * (here.world - 1) / here.world * values.nbytes / seconds
    value = f"{rate / 1e9:,.2f} GB/s between {_ranks(here)} ({megabytes} MiB)"
    if rate < SLOW_BYTES_PER_SECOND[setup.device]:
        return slow("all-reduce", value, _advice(setup), bytes_per_second=rate)
    return works("all-reduce", value, bytes_per_second=rate)


def sharded(setup: Setup) -> Check:
    """Gather and scatter shards, as ZeRO does."""
    if setup.gpus == 1:
        return skipped("sharding", "one GPU")
    here = join_processes()
    own = torch.full((1024,), float(here.rank), device=here.device)
    gathered = torch.empty(1024 * here.world, device=here.device)
    dist.all_gather_into_tensor(gathered, own)
    right = torch.arange(here.world, device=here.device).float().repeat_interleave(1024)
    if problem := _wrong_on_any_rank(gathered - right, 0.0, here):
        return broken("sharding", f"all-gather: {problem}", _advice(setup))
    dist.reduce_scatter_tensor(own, right)
    if problem := _wrong_on_any_rank(own, float(here.rank * here.world), here):
        return broken("sharding", f"reduce-scatter: {problem}", _advice(setup))
    return works("sharding", f"all-gather and reduce-scatter between {_ranks(here)}")


def signals(setup: Setup) -> Check:
    """Exchange a flag over gloo on the host, as training does with signals in each step."""
    if setup.gpus == 1:
        return skipped("signals", "one GPU")
    here = join_processes()
    group: Any = dist.new_group(backend="gloo")
    flag = torch.tensor([here.rank])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    if flag.item() != here.world - 1:
        return broken("signals", "gloo exchanges wrong values", CPU_ADVICE)
    return works("signals", "gloo agrees on a flag on the host")


def peer_access(setup: Setup) -> Check:
    """Check that GPUs read the memory of each other directly."""
    if setup.gpus < 2:
        return skipped("peer access", "one GPU" if setup.gpus else "no GPU")
    pairs = [(i, j) for i in range(setup.gpus) for j in range(setup.gpus) if i != j]
    missing = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if missing:
        value = f"{len(missing)} of {len(pairs)} pairs of GPUs communicate through host memory"
        return slow("peer access", value, "nvidia-smi topo -m shows the connections; ACS in the BIOS prevents it")
    return works("peer access", f"all {len(pairs)} pairs of GPUs")


def _wrong_on_any_rank(values: torch.Tensor, expected: float, here: Processes) -> str | None:
    """Return which rank has other values than expected; the same on every rank."""
    wrong = torch.tensor([(values != expected).any().float()], device=here.device)
    all_wrong = [torch.empty_like(wrong) for _ in range(here.world)]
    dist.all_gather(all_wrong, wrong)
    ranks = [str(rank) for rank, each in enumerate(all_wrong) if each.item()]
    return f"rank {', '.join(ranks)} received wrong values" if ranks else None


def _seconds(collective: Callable[[], object], here: Processes, repeats: int = 5) -> float:
    """Return the seconds of the fastest repetition."""
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        _synchronize(here)
        start = time.perf_counter()
        collective()
        _synchronize(here)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(here: Processes) -> None:
    if here.device.type == "cuda":
        torch.cuda.synchronize()


def _ranks(here: Processes) -> str:
    return f"{here.world} GPUs over NCCL" if here.device.type == "cuda" else f"{here.world} processes over gloo"


def _advice(setup: Setup) -> str:
    return ADVICE if setup.gpus else CPU_ADVICE
