"""What the training loop costs beyond forward, backward and the optimizer's step.

    python benchmarks/loop_overhead.py [--rounds 12] [--model vit_cifar_small] [--batch 64] [--json]

One side is the loop's own update with all that belongs to it: normalising uint8 images, soft targets, the guard against
non-finite values, clipping, EMA, norms and logging (once in a round, far more often than by default), an offline W&B
run. The other is a bare loop over the same model and batch with fused AdamW. Loading, evaluating and saving are not in
it: they have benchmarks of their own.
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
from side_by_side import compare, interleave, parser, seconds, show

from vit_scale.data.batch import Batch
from vit_scale.recipe import build_config
from vit_scale.tasks.classify.loss import classification_loss
from vit_scale.train.build import Run, build_run
from vit_scale.train.loop import log, take_step
from vit_scale.train.meter import Meter

STEPS = 5
GOAL = 1.02
LIMIT = "the EMA's pass over the weights; clipping and the guard ride on the optimizer's own pass"


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__, rounds=12)
    options.add_argument("--model", default="vit_cifar_small")
    options.add_argument("--batch", type=int, default=64)
    args = options.parse_args()
    # What the run says goes where it does not mix with the figures.
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        run = open_run(args, Path(scratch))
        batches = next(run.steps())
        work = {"ours": our_steps(run, batches), "bare": bare_steps(run, batches)}
        sides = {name: lambda steps=steps: seconds(steps, args.device) / STEPS for name, steps in work.items()}
        values = interleave(sides, args.rounds)
        run.close()
        run.record.close()
    case = f"{args.model}, batch {args.batch}: a step of the loop over a bare one"
    show([compare(case, values, "ours", "bare", "s", goal=GOAL, better="lower", limit=LIMIT)], args)


def open_run(args: argparse.Namespace, scratch: Path) -> Run:
    """A run that would go on for ever."""
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
    """Updates as vit_scale.train.loop does them, and what is logged of them."""
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
    """The same model and batch, and nothing else."""
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
