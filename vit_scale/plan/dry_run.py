"""Print the plan of a run without training or writing anything: `launch/train.py RECIPE --dry-run`."""

from __future__ import annotations

import json

from vit_scale.config import Config
from vit_scale.errors import UserError
from vit_scale.launcher import is_main_process
from vit_scale.plan.machine import find_machine
from vit_scale.plan.print_plan import print_plan
from vit_scale.plan.run_plan import make_run_plan


def dry_run(
    config: Config,
    recipe: str,
    gpus: int | None = None,
    gpu: str | None = None,
    *,
    gpu_memory: float | None = None,
    gpu_tflops: float | None = None,
    mfu: float | None = None,
    images: int | None = None,
    as_json: bool = False,
) -> int:
    """Print the plan of `config` on `gpus` GPUs of type `gpu`, by default on this system as launched.

    `gpu_memory` (GB) and `gpu_tflops` describe a GPU that is not in the table. `mfu` overrides the assumed MFU.
    `images` is the number of training images of a source of unknown size.
    """
    if mfu is not None and not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu:g}: must be greater than 0 and at most 1")
    if images is not None and images < 1:
        raise UserError(f"--images {images}: must be at least 1")
    machine = find_machine(gpus, gpu, memory_gb=gpu_memory, tflops=gpu_tflops)
    run = make_run_plan(config, recipe, machine, mfu=mfu, images=images)
    if not is_main_process():
        return 0
    if as_json:
        print(json.dumps(run.to_dict(), indent=2))
    else:
        print_plan(run)
    return 0
