"""Overhead of the training loop compared with forward, backward and optimizer step.

    python benchmarks/loop_overhead.py [--rounds 12] [--model vit_cifar_small] [--batch 64] [--json]

One side is the full step of the loop: normalizing uint8 images, soft targets, the check for non-finite values,
clipping, EMA, norms and logging (once per round, far more often than by default), and an offline W&B run. The other is
a bare loop over the same model and batch with fused AdamW. Data loading, evaluation and checkpointing are excluded:
they have separate benchmarks.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from compare import compare, interleave, parser, seconds, show

from vit_scale.data.batch import Batch
from vit_scale.recipe import build_config
from vit_scale.tasks.classify.loss import classification_loss
from vit_scale.train.build import Run, build_run
from vit_scale.train.loop import log, take_step
from vit_scale.train.meter import Meter

STEPS = 5
TARGET = 1.02
LIMIT = "the EMA's pass over the weights; clipping and the non-finite check are fused into the optimizer's pass"


def main() -> None:
    """Run the benchmark and print the results."""
    options = parser(__doc__, rounds=12)
    options.add_argument("--model", default="vit_cifar_small")
    options.add_argument("--batch", type=int, default=64)
    args = options.parse_args()
    # Keep the output of the run separate from the results.
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        run = open_run(args, Path(scratch))
        batches = next(run.steps())
        work = {"ours": our_steps(run, batches), "bare": bare_steps(run, batches)}
        sides = {name: lambda steps=steps: seconds(steps, args.device) / STEPS for name, steps in work.items()}
        values = interleave(sides, args.rounds)
        run.close()
        run.record.close()
    case = f"{args.model}, batch {args.batch}: step of the loop vs. bare step"
    show([compare(case, values, "ours", "bare", "s", target=TARGET, better="lower", limit=LIMIT)], args)


def open_run(args: argparse.Namespace, scratch: Path) -> Run:
    """Build a run that is never finished."""
    recipe = {
        "model": {"name": args.model},
        "data": {"source": "synthetic", "synthetic_images": args.batch, "synthetic_size": 32, "workers": 0},
        "schedule": {"steps": 1_000_000},
        "batch": {"global": args.batch, "micro": args.batch},
        "ema": {"decay": 0.999},
        "run": {"dir": str(scratch / "run")},
        "track": {"wandb": "offline"},
    }
    run = build_run(build_config(recipe), "benchmark")
    run.record.wait_for_trackers()
    return run


def our_steps(run: Run, batches: list[Batch]) -> Callable[[], None]:
    """Return steps as in vit_scale.train.loop, with logging."""
    meter = Meter(run)

    def steps() -> None:
        for i in range(STEPS):
            if i == STEPS - 1:
                meter.watch_update()
            parts, norm = take_step(run, batches)
            meter.add(parts, norm)
            run.record.terminal.advance(run.state.step)
        log(run, meter)

    return steps


def bare_steps(run: Run, batches: list[Batch]) -> Callable[[], None]:
    """Return bare steps with the same model and batch."""
    inputs = run.task.inputs(batches[0], step=0)
    images, targets, model = inputs.args[0].clone(), inputs.rest["target"], copy.deepcopy(run.state.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def steps() -> None:
        for _ in range(STEPS):
            classification_loss("cross_entropy", model(images), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return steps


if __name__ == "__main__":
    main()
