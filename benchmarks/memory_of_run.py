"""Measures the memory of a run: a few updates by the training loop, on one process or under a launcher.

    python benchmarks/memory_of_run.py RECIPE [a.b=c ...]

Prints a line of JSON for each process: the most bytes that torch had allocated at once on its device. Data and
logging are left out: a batch that stays in memory is trained on.
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

UPDATES = 3


def main() -> None:
    """Parse, measure, print."""
    recipe, *options = sys.argv[1:]
    config = load_recipe(recipe, options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs: list[Run] = []

    def work() -> Run:
        runs.append(build_run(config, recipe))
        take_updates(runs[0])
        return runs[0]

    peak = peak_bytes(work, device)
    sys.stdout.write(json.dumps({"peak": peak}) + "\n")
    sys.stdout.flush()
    runs[0].close()
    close_processes()


def take_updates(run: Run) -> None:
    """Updates as the loop takes them, on the first batches of the run."""
    batches = next(run.steps())
    for _ in range(UPDATES):
        take_step(run, batches)


if __name__ == "__main__":
    main()
