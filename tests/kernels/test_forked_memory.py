"""Data-loading workers give up the tensors that only training needs, and nothing else."""

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from vit_scale.kernels.forked_memory import release_in_workers, release_inherited_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")

_BYTES = 64 * 2**20
_fork = multiprocessing.get_context("fork")


class _Owner:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def tensors(self) -> list[torch.Tensor]:
        # Two views of one storage, as the parameters of a flat buffer are.
        return list(self.tensor.chunk(2))


def _private_bytes() -> int:
    """Return how many bytes belong to this process alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _worker(release: bool, read: torch.Tensor, pipe) -> None:
    if release:
        release_inherited_memory()
    before = _private_bytes()
    pipe.send("started")
    pipe.recv()  # the parent has rewritten its tensors
    growth = _private_bytes() - before
    pipe.send((growth, float(read.sum())))


def _growth_of_worker(release: bool, rewritten: torch.Tensor, read: torch.Tensor) -> tuple[int, float]:
    """Return by how many bytes a worker grows while the parent rewrites a tensor, and the worker's sum of another."""
    pipe, end = _fork.Pipe()
    worker = _fork.Process(target=_worker, args=(release, read, end))
    worker.start()
    pipe.recv()
    rewritten.add_(1)
    pipe.send("rewritten")
    result = pipe.recv()
    worker.join(30)
    assert worker.exitcode == 0
    return result


def test_worker_keeps_no_copy_of_registered_tensors():
    owner, other = _Owner(torch.ones(_BYTES // 4)), torch.ones(2**20)
    release_in_workers(owner)
    kept, _ = _growth_of_worker(release=False, rewritten=owner.tensor, read=other)
    released, total = _growth_of_worker(release=True, rewritten=owner.tensor, read=other)
    assert kept > 0.9 * _BYTES, "without the call the worker keeps a copy"
    assert released < 0.1 * _BYTES
    assert total == 2**20, "memory that is not registered stays"
    assert owner.tensor.eq(3).all(), "the parent keeps its tensors"


def test_shared_tensors_stay_readable():
    owner = _Owner(torch.ones(_BYTES // 4).share_memory_())
    release_in_workers(owner)
    _, total = _growth_of_worker(release=True, rewritten=torch.ones(1), read=owner.tensor)
    assert total == _BYTES // 4


def test_owner_that_is_gone_is_forgotten():
    owner = _Owner(torch.ones(_BYTES // 4))
    release_in_workers(owner)
    del owner
    read = torch.ones(2**20)
    _, total = _growth_of_worker(release=True, rewritten=torch.ones(1), read=read)
    assert total == 2**20
