"""What saving costs training: `CheckpointFolder.save` beside `torch.save` of the same state, in one run.

    python benchmarks/checkpoint.py [--model vit_cifar_base] [--batch 4] [--device cpu] [--rounds 5] [--json]

Each round trains some steps without saving, then saves in both ways in turn and trains on after each until nothing is
written any more. The first row is how long the call keeps training waiting. The second adds the slow-down of the steps
while a thread writes: what the save and the steps after it took beyond as many steps without one; the same in processor
time is what other programs disturb least. The state is weights, AdamW's moments and the average. `torch.save` leaves
the bytes in the system's cache; ours waits for the disk and computes checksums, but in the thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from side_by_side import Rounds, Row, compare, parser, show

import vit_scale
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.config import OptimConfig
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.replicated import PlainEngine
from vit_scale.train.optim.optimizer import build_optimizer
from vit_scale.train.state import TrainState

STEPS_BETWEEN_SAVES = 50
STEPS_OF_A_ROUND = 3
GOAL = 0.2
LIMIT = "copying weights, moments and average in memory, so that a thread can write them while training changes them"
LIMIT_OF_STALL = "without a GPU, writing and checksums take processor time from the steps; with one, from idle cores"


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
        engine = PlainEngine(net, optimizer)
        self.ema = Ema(engine.shards, 0.999, warmup=True)
        self.state = TrainState(engine, self.ema)
        self.images = torch.randn(batch, net.in_chans, *net.img_size, device=device)
        self.labels = torch.zeros(batch, dtype=torch.int64, device=device)

    def step(self) -> None:
        """One update, waited for."""
        F.cross_entropy(self.state.engine(self.images), self.labels).backward()
        self.state.engine.optimizer.step()
        self.state.engine.optimizer.zero_grad()
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
        torch.save([self.state.model.state_dict(), self.state.engine.optimizer.state_dict(), average], path)


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


def measure(args: argparse.Namespace, disk: Path) -> tuple[Rounds, float]:
    """Seconds of each way in each round, after one that warms up, and the megabytes of a checkpoint."""
    training = Training(args.model, args.batch, args.device)
    folder = CheckpointFolder(disk, keep=1, rank=0, world=1, session="benchmark")
    ways = {
        "ours": (lambda: folder.save(training.state, {}), folder.is_writing),
        "torch": (lambda: training.save_with_torch(disk / "torch.pt"), lambda: False),
    }
    rounds: Rounds = defaultdict(list)
    for number in range(args.rounds + 1):
        plain = training.time_per_step()
        seconds = {"steps between saves": float(plain[0]) * STEPS_BETWEEN_SAVES}
        for name in sorted(ways, reverse=bool(number % 2)):
            seconds |= {f"{name} {key}": value for key, value in cost(training, *ways[name], plain).items()}
        if number > 0:
            for key, value in seconds.items():
                rounds[key].append(value)
    folder.close()
    if problem := folder.problem():
        raise SystemExit(problem)
    return rounds, sum(path.stat().st_size for path in disk.glob("checkpoints/*/*")) / 1e6


def rows_of(rounds: Rounds) -> list[Row]:
    """What the call keeps training waiting, and that with the slow-down while a thread writes."""
    blocks = compare(
        "the call alone", rounds, "ours blocks", "torch blocks", "s", goal=GOAL, better="lower", limit=LIMIT
    )
    stall = compare("with the slow-down of steps", rounds, "ours stall", "torch blocks", "s", limit=LIMIT_OF_STALL)
    between = statistics.median(rounds["steps between saves"])
    for row, key in ((blocks, "blocks"), (stall, "stall")):
        share = statistics.median(rounds[f"ours {key}"]) / between
        row.more[f"of the time of {STEPS_BETWEEN_SAVES} steps"] = share
    stall.more["ratio by processor time"] = statistics.median(
        x / y for x, y in zip(rounds["ours cpu"], rounds["torch cpu"], strict=True)
    )
    return [blocks, stall]


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--model", default="vit_cifar_base")
    options.add_argument("--batch", type=int, default=4)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as disk:
        rounds, megabytes = measure(args, Path(disk))
    show(rows_of(rounds), args, [f"{args.model}, batch {args.batch}: {megabytes:.0f} MB a checkpoint"])


if __name__ == "__main__":
    main()
