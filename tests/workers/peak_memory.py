"""Measures the memory of training steps on the CPU, on one process or under DDP.

`peak_memory.py CASES`: for each case of a JSON list, the most bytes that torch's allocator had handed out at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vit_scale.cost.measured import peak_bytes
from vit_scale.models import create_model
from vit_scale.strategies.replicated import ddp_options


def train(model: dict[str, Any], batch: int, accumulation: int, checkpointing: str) -> object:
    """Three updates as the loop does them: gradients are freed after each."""
    inner = create_model(**model).train()
    inner.set_activation_checkpointing(checkpointing)
    wrapped = DistributedDataParallel(inner, **ddp_options().to_kwargs()) if dist.is_initialized() else inner
    optimizer = torch.optim.AdamW(inner.parameters(), fused=True)
    images, labels = torch.zeros(batch, 3, *inner.img_size), torch.zeros(batch, dtype=torch.long)
    for _ in range(3):
        for i in range(accumulation):
            waits = dist.is_initialized() and i < accumulation - 1
            with wrapped.no_sync() if waits else contextlib.nullcontext():
                torch.nn.functional.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return wrapped, optimizer


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    # What gloo's threads free is seen late, and who waits for whom decides how much that is: the smaller of two tries.
    tries = 2 if dist.is_initialized() else 1
    peaks = [min(peak_bytes(lambda case=case: train(**case)) for _ in range(tries)) for case in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(peaks) + "\n")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
