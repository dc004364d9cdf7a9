"""Measurements between two logged steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import psutil
import torch
import torch.distributed as dist

from vit_scale import gpu
from vit_scale.data.batch import Batch
from vit_scale.strategies.norms import UpdateWatch
from vit_scale.train.run import Run


@dataclass
class Meter:
    """Sums since the last logged step; they stay on the device until `read`."""

    run: Run
    steps: int = 0
    waited: float = 0.0
    flops: float = 0.0
    since: float = field(default_factory=time.perf_counter)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of each part of the loss."""
    norm: torch.Tensor | None = None
    finite_norm: torch.Tensor | None = None
    """The last finite gradient norm."""
    watch: UpdateWatch | None = None

    def __post_init__(self) -> None:
        gpu.reset_peak_memory(self.run.device)  # Trials of micro-batches needed more than training will.

    def timed(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield `steps`, and count the time spent waiting for them."""
        while True:
            start = time.perf_counter()
            try:
                batches = next(steps)
            except StopIteration:
                return
            self.waited += time.perf_counter() - start
            yield batches

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time spent inside as training time."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def watch_update(self) -> None:
        """Measure the next weight update; called before steps that are logged."""
        self.watch = UpdateWatch(self.run.state.engine.shards, self.run.device)

    def add(self, parts: dict[str, torch.Tensor], norm: torch.Tensor) -> None:
        """Add the parts of the loss and the gradient norm of a step."""
        self.sums = {name: self.sums[name] + value if name in self.sums else value for name, value in parts.items()}
        self.norm = norm
        before = norm if self.finite_norm is None else self.finite_norm
        self.finite_norm = torch.where(norm.isfinite(), norm, before)
        self.steps += 1
        self.flops += self.run.cost.flops(self.run.task.progressive.size_at(self.run.state.step - 1))

    def read(self) -> dict[str, float]:
        """Return the metrics since the last call, over all processes, and restart."""
        run, step = self.run, self.run.state.step
        losses, param_norm, update_norm = self._read_device()
        assert self.norm is not None
        metrics = {
            "epoch": run.plan.epoch(step),
            "images": step * run.plan.global_batch,
            "train/loss": losses.pop("loss"),
            "train/lr": run.lr_at(step - 1),
            "train/weight_decay": max(group["weight_decay"] for group in run.state.engine.optimizer.param_groups),
            "train/grad_norm": self.norm.item(),
            "train/param_norm": param_norm,
            "train/update_norm": update_norm,
            "train/skipped_steps": run.state.skipped_steps.item(),
        }
        metrics |= {f"train/loss_{name}": value for name, value in losses.items()}
        metrics |= self._speed() | memory(run.device)
        self.restart()
        return metrics

    def _read_device(self) -> tuple[dict[str, float], float, float]:
        """Return mean losses, weight norm and norm of the last weight update: one reduction, one synchronization."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        losses = torch.stack([loss.double() / (self.steps * world) for loss in self.sums.values()])
        watch = self.watch or UpdateWatch(self.run.state.engine.shards, self.run.device)
        sums = torch.cat([losses, watch.squares()])
        self.watch = None
        if world > 1:
            dist.all_reduce(sums)
        *means, weights, update = sums.tolist()
        return dict(zip(self.sums, means, strict=True)), weights**0.5, update**0.5

    def _speed(self) -> dict[str, float]:
        run, seconds = self.run, time.perf_counter() - self.since
        images_per_second = self.steps * run.plan.global_batch / seconds
        speed = {"speed/images_per_second": images_per_second, "speed/data_wait": self.waited / seconds}
        if (mfu := run.cost.mfu(self.flops, seconds)) is not None:
            speed["speed/mfu"] = mfu
        images = self.steps * run.plan.global_batch
        for label, flops in run.cost.frozen_per_image.items():  # included in speed/mfu
            if (mfu := run.cost.mfu(images * flops, seconds)) is not None:
                speed[f"speed/mfu_{label}"] = mfu
        return speed

    def restart(self) -> None:
        """Reset the sums; called after an evaluation, whose time is not training time."""
        self.steps, self.waited, self.flops, self.since = 0, 0.0, 0.0, time.perf_counter()
        self.sums, self.norm = {}, None


def memory(device: torch.device) -> dict[str, float]:
    """Return gigabytes of the main process: the peak on its GPU since the first step, or resident memory on a CPU."""
    if gpu.is_gpu(device):
        return {"memory/device_gb": gpu.peak_memory(device) / 1e9}
    return {"memory/process_gb": _process().memory_info().rss / 1e9}


@cache
def _process() -> psutil.Process:
    return psutil.Process()
