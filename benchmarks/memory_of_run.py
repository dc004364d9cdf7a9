"""Measure the memory of a run: a few steps of the training loop, on one process or with a launcher.

    python benchmarks/memory_of_run.py RECIPE [a.b=c ...]

Prints one line of JSON per process: the peak number of bytes that torch has allocated on its device. Data loading and
logging are excluded: it trains on one batch in memory.
"""

from __future__ import annotations

import json
import sys

import torch

from vit_scale.cost.measured import peak_bytes
from vit_scale.recipe import load_recipe
from vit_scale.strategies.processes import close_processes
from vit_scale.train.build import Run, build_run
from vit_scale.train.loop import take_step

STEPS = 3


def main() -> None:
    """Measure and print the peak memory."""
    recipe, *options = sys.argv[1:]
    config = load_recipe(recipe, options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs: list[Run] = []

    def work() -> Run:
        runs.append(build_run(config, recipe))
        run_steps(runs[0])
        return runs[0]

    peak = peak_bytes(work, device)
    sys.stdout.write(json.dumps({"peak": peak}) + "\n")
    sys.stdout.flush()
    runs[0].close()
    close_processes()


def run_steps(run: Run) -> None:
    """Run steps of the training loop on the first batches of the run."""
    batches = next(run.steps())
    for _ in range(STEPS):
        take_step(run, batches)


if __name__ == "__main__":
    main()
