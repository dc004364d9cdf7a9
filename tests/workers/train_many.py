"""Trains several recipes one after another in the same processes, so that libraries are imported once.

Usage: train_many.py JOBS, where JOBS is a JSON list of {"recipe": path, "options": ["a.b=c", ...]}. Prints a line
`status RANK JOB STATUS` for each. Under a launcher it runs on all processes.
"""

from __future__ import annotations

import json
import os
import sys

from accelerate.state import AcceleratorState, GradientState, PartialState

from vit_scale.errors import UserError
from vit_scale.recipe import load_recipe
from vit_scale.train import close_processes, run_recipe


def main() -> None:
    for number, job in enumerate(json.loads(sys.argv[1])):
        try:
            status = run_recipe(load_recipe(job["recipe"], job["options"]), job["recipe"])
        except UserError as error:
            print(f"error: {error}", flush=True)
            status = 2
        print(f"status {os.environ.get('RANK', '0')} {number} {status}", flush=True)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    close_processes()


if __name__ == "__main__":
    main()
