"""What is measured between two logged steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import psutil
import torch
import torch.distributed as dist

from vit_scale.data.loading.loaders import Batch
from vit_scale.strategies.norms import UpdateWatch
from vit_scale.train.build import Run


@dataclass
class Meter:
    """Sums since the last logged step; they stay on the device until `read`."""

    run: Run
    steps: int = 0
    waited: float = 0.0
    flops: float = 0.0
    since: float = field(default_factory=time.perf_counter)
    loss_sum: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    finite_norm: torch.Tensor | None = None
    """The last gradient norm that was a number."""
    watch: UpdateWatch | None = None

    def timed(self, updates: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """`updates`, with the time spent waiting for them counted."""
        while True:
            start = time.perf_counter()
            try:
                batches = next(updates)
            except StopIteration:
                return
            self.waited += time.perf_counter() - start
            yield batches

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside takes no training time."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def watch_update(self) -> None:
        """Have the next update measured; called in steps that will be logged."""
        self.watch = UpdateWatch(self.run.state.engine.shards, self.run.device)

    def add(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss
        self.norm = norm
        before = norm if self.finite_norm is None else self.finite_norm
        self.finite_norm = torch.where(norm.isfinite(), norm, before)
        self.steps += 1
        self.flops += self.run.flops_of(self.run.state.step - 1)

    def read(self) -> dict[str, float]:
        """The metrics since the last call, over all processes; then start anew."""
        run, step = self.run, self.run.state.step
        loss, param_norm, update_norm = self._read_device()
        assert self.norm is not None
        metrics = {
            "epoch": run.plan.epoch(step),
            "images": step * run.plan.global_batch,
            "train/loss": loss,
            "train/lr": run.lr.at(step - 1),
            "train/weight_decay": max(group["weight_decay"] for group in run.state.engine.optimizer.param_groups),
            "train/grad_norm": self.norm.item(),
            "train/param_norm": param_norm,
            "train/update_norm": update_norm,
            "train/skipped_steps": run.state.skipped_steps.item(),
        }
        metrics |= self._speed() | memory(run.device)
        self.restart()
        return metrics

    def _read_device(self) -> tuple[float, float, float]:
        """Mean loss, norm of the weights, norm of the last update: one reduction over processes, one wait."""
        assert self.loss_sum is not None
        world = dist.get_world_size() if dist.is_initialized() else 1
        loss = self.loss_sum.double() / (self.steps * world)
        watch = self.watch or UpdateWatch(self.run.state.engine.shards, self.run.device)
        sums = torch.cat([loss.view(1), watch.squares()])
        self.watch = None
        if world > 1:
            dist.all_reduce(sums)
        mean_loss, weights, update = sums.tolist()
        return mean_loss, weights**0.5, update**0.5

    def _speed(self) -> dict[str, float]:
        run, seconds = self.run, time.perf_counter() - self.since
        images_per_second = self.steps * run.plan.global_batch / seconds
        speed = {"speed/images_per_second": images_per_second, "speed/data_wait": self.waited / seconds}
        if run.peak.flops:
            speed["speed/mfu"] = self.flops / seconds / (run.peak.flops * run.plan.processes)
        return speed

    def restart(self) -> None:
        """Forget what was summed; evaluation calls it so that its time is not training time."""
        self.steps, self.waited, self.flops, self.since = 0, 0.0, 0.0, time.perf_counter()
        self.loss_sum = self.norm = None


def memory(device: torch.device) -> dict[str, float]:
    """Gigabytes of the main process: the peak on its GPU, or what it has resident on a CPU."""
    if device.type == "cuda":
        return {"memory/device_gb": torch.cuda.max_memory_allocated(device) / 1e9}
    return {"memory/process_gb": _process().memory_info().rss / 1e9}


@cache
def _process() -> psutil.Process:
    return psutil.Process()
