"""Trains several recipes one after another in the same processes, so that libraries are imported once.

Usage: train_many.py JOBS, where JOBS is a JSON list of
    {"recipe": path, "options": ["a.b=c", ...], "signal_at": step, "signal_in_evaluation": batch, "closed_at": step,
     "poison_at": [step, ...], "too_large": images}
`signal_at`: the last rank receives SIGUSR1 during that step. `signal_in_evaluation`: or before this batch of an
evaluation. `poison_at`: it has a NaN gradient in these steps. `closed_at`: the reader of rank 0's output leaves during
that step.
`too_large`: sizes are tried before training, and the last rank runs out of memory with a micro-batch of this size.
All of them are optional. Prints a line `status RANK JOB STATUS` per job. Under a launcher it runs on all ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from vit_scale.errors import UserError
from vit_scale.kernels import cpu
from vit_scale.recipe import load_recipe
from vit_scale.record.progress import OutputConsole
from vit_scale.strategies.processes import close_processes, restored_process
from vit_scale.tasks.classify.classification import Classification
from vit_scale.train import loop, micro_batch
from vit_scale.train.run_recipe import run_recipe

RANK = int(os.environ.get("RANK", "0"))
LAST = int(os.environ.get("WORLD_SIZE", "1")) - 1 == RANK
cpu.WORTHWHILE_MACS = cpu.WORTHWHILE_ELEMENTS = 0  # Small models are computed like large ones here.
UPDATE, LOSS = loop.update, Classification.loss
EVALUATE, IS_CLOSED = loop.evaluate, OutputConsole.is_closed
FITS, SPEED = micro_batch.fits_in_host_memory, micro_batch._images_per_second


def poisoned_loss(task, outputs, inputs):  # type: ignore[no-untyped-def]
    return {"loss": LOSS(task, outputs, inputs)["loss"] * float("nan")}


def arrange(job: dict) -> None:
    """Arrange the faults that `job` names."""

    def update(task, state, batches, **options):  # type: ignore[no-untyped-def]
        if LAST and state.step == job.get("signal_at"):
            os.kill(os.getpid(), signal.SIGUSR1)
        if RANK == 0 and state.step == job.get("closed_at"):
            OutputConsole.is_closed = True
        poisoned = LAST and state.step in (job.get("poison_at") or [])
        Classification.loss = poisoned_loss if poisoned else LOSS
        return UPDATE(task, state, batches, **options)

    def images_per_second(engine, task, size, repeats):  # type: ignore[no-untyped-def]
        speed = SPEED(engine, task, size, repeats)
        print(f"tried {size}", flush=True)
        if LAST and size == job.get("too_large"):
            raise MemoryError
        return speed

    def evaluate(task, model, batches, **options):  # type: ignore[no-untyped-def]
        def each():  # type: ignore[no-untyped-def]
            for number, batch in enumerate(batches):
                if LAST and number == job.get("signal_in_evaluation"):
                    os.kill(os.getpid(), signal.SIGUSR1)
                yield batch

        return EVALUATE(task, model, each(), **options)

    loop.update, loop.evaluate = update, evaluate
    OutputConsole.is_closed = IS_CLOSED
    micro_batch._images_per_second = images_per_second
    micro_batch.fits_in_host_memory = (lambda *_: False) if "too_large" in job else FITS


def main() -> None:
    for number, job in enumerate(json.loads(sys.argv[1])):
        arrange(job)
        with restored_process(keep_group=True):
            try:
                status = run_recipe(load_recipe(job["recipe"], job["options"]), job["recipe"])
            except UserError as error:
                print(f"error: {error}", flush=True)
                status = 2
        # One write: torchrun's processes are unbuffered, and `print` would write the end of the line separately.
        sys.stdout.write(f"status {RANK} {number} {status}\n")
        sys.stdout.flush()
    close_processes()


if __name__ == "__main__":
    main()
