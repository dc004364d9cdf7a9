"""What saving costs training: `CheckpointFolder.save` beside `torch.save` of the same state, in one run.

    python benchmarks/checkpoint.py [--model vit_cifar_base] [--batch 4] [--device cpu] [--rounds 5] [--json]

Each round trains some steps without saving, then saves in both ways in turn and trains on after each until nothing is
written any more. `blocks` is how long the call keeps training waiting. `stall` adds the slow-down of the steps while
a thread writes: what the save and the steps after it took beyond as many steps without one. `cpu` is the same in
processor time, which other programs on the machine disturb least. Ratios are taken within a round, and their median is
reported. The state is weights, AdamW's moments and the average. `torch.save` leaves the bytes in the system's cache;
ours waits for the disk and computes checksums, but in the thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import vit_scale
from vit_scale.config import OptimConfig
from vit_scale.train.checkpoint import CheckpointFolder
from vit_scale.train.ema import Ema
from vit_scale.train.optim import build_optimizer
from vit_scale.train.shards import Replicated
from vit_scale.train.state import TrainState

STEPS_BETWEEN_SAVES = 50
STEPS_OF_A_ROUND = 3


Times = np.ndarray
"""Seconds by the clock, and of the processor in all threads of this process."""


def now() -> Times:
    return np.array([time.perf_counter(), time.process_time()])


class Training:
    """A model in training on random images."""

    def __init__(self, model: str, batch: int, device: str) -> None:
        torch.manual_seed(0)
        net: Any = vit_scale.create_model(model).to(device)
        optimizer = build_optimizer(net, OptimConfig())
        shards = Replicated(net, optimizer, rank=0, world=1)
        self.ema = Ema(shards, 0.999, warmup=True)
        self.state = TrainState(net, net, optimizer, shards, self.ema)
        self.images = torch.randn(batch, net.in_chans, *net.img_size, device=device)
        self.labels = torch.zeros(batch, dtype=torch.int64, device=device)

    def step(self) -> None:
        """One update, waited for."""
        F.cross_entropy(self.state.wrapped(self.images), self.labels).backward()
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.ema.update(self.state.step)
        self.state.step += 1
        if self.images.is_cuda:
            torch.cuda.synchronize()

    def time_per_step(self) -> Times:
        """Of steps that nothing is saved beside."""
        start = now()
        for _ in range(STEPS_OF_A_ROUND):
            self.step()
        return (now() - start) / STEPS_OF_A_ROUND

    def save_with_torch(self, path: Path) -> None:
        average = {name: piece.tensor for name, piece in self.ema.pieces().items()}
        torch.save([self.state.model.state_dict(), self.state.optimizer.state_dict(), average], path)


def cost(
    training: Training, save: Callable[[], None], is_writing: Callable[[], bool], plain_step: Times
) -> dict[str, float]:
    """Seconds that `save` blocks, and by how much it and the steps after it exceed such steps alone."""
    start = now()
    save()
    blocks = now() - start
    steps = 0
    while steps < STEPS_OF_A_ROUND or is_writing():
        training.step()
        steps += 1
    stall, cpu = now() - start - steps * plain_step
    return {"blocks": float(blocks[0]), "stall": float(stall), "cpu": float(cpu)}


def measure(args: argparse.Namespace, disk: Path) -> dict[str, Any]:
    """Medians over the rounds, after one that warms up."""
    training = Training(args.model, args.batch, args.device)
    folder = CheckpointFolder(disk, keep=1, rank=0, world=1, session="benchmark")
    ways = {
        "ours": (lambda: folder.save(training.state, {}), folder.is_writing),
        "torch": (lambda: training.save_with_torch(disk / "torch.pt"), lambda: False),
    }
    rounds: list[dict[str, float]] = []
    for number in range(args.rounds + 1):
        plain = training.time_per_step()
        seconds = {"step": float(plain[0])}
        for name in sorted(ways, reverse=bool(number % 2)):
            seconds |= {f"{name}_{key}": value for key, value in cost(training, *ways[name], plain).items()}
        rounds.append(seconds)
    folder.close()
    if problem := folder.problem():
        raise SystemExit(problem)
    size = sum(path.stat().st_size for path in disk.glob("checkpoints/*/*"))
    return {"checkpoint_megabytes": size / 1e6, **summarize(rounds[1:])}


def summarize(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Seconds, ratios to `torch.save`, and shares of the time between two saves."""

    def median(value: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(value, rounds))

    seconds = {f"{key}_seconds": median(lambda one, key=key: one[key]) for key in rounds[0]}  # type: ignore[misc]
    return seconds | {
        "blocks_over_torch_save": median(lambda one: one["ours_blocks"] / one["torch_blocks"]),
        "stall_over_torch_save": median(lambda one: one["ours_stall"] / one["torch_blocks"]),
        "cpu_over_torch_save": median(lambda one: one["ours_cpu"] / one["torch_cpu"]),
        "ours_blocks_share": median(lambda one: one["ours_blocks"] / (STEPS_BETWEEN_SAVES * one["step"])),
        "ours_stall_share": median(lambda one: one["ours_stall"] / (STEPS_BETWEEN_SAVES * one["step"])),
        "torch_stall_share": median(lambda one: one["torch_stall"] / (STEPS_BETWEEN_SAVES * one["step"])),
    }


def as_text(report: dict[str, Any]) -> str:
    size = f"{report['checkpoint_megabytes']:.0f} MB a checkpoint"
    lines = [f"{report['model']}, batch {report['batch']}, {report['step_seconds']:.3f} s a step, {size}"]
    lines += [f"{'':<21}  {'blocks':>8}  {'stall':>8}  {'cpu':>8}  stall over {STEPS_BETWEEN_SAVES} steps"]
    for name, side in (("CheckpointFolder.save", "ours"), ("torch.save", "torch")):
        seconds = "  ".join(f"{report[f'{side}_{key}_seconds']:6.3f} s" for key in ("blocks", "stall", "cpu"))
        lines += [f"{name:<21}  {seconds}  {report[f'{side}_stall_share']:.2%}"]
    ratios = "  ".join(f"{report[f'{key}_over_torch_save']:8.2f}" for key in ("blocks", "stall", "cpu"))
    return "\n".join([report["machine"], *lines, f"{'ratio':<21}  {ratios}"])


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_cifar_base")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    processor = torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} cores"
    machine = f"{platform.machine()}, {processor}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    with tempfile.TemporaryDirectory() as disk:
        report = {"machine": machine, "model": args.model, "batch": args.batch, **measure(args, Path(disk))}
    print(json.dumps(report, indent=2) if args.json else as_text(report))


if __name__ == "__main__":
    main()
