"""`launch/train.py` that pauses before step 5, the first time, for a test to kill it.

The W&B client sends data immediately, not every 15 seconds.

Usage: pauses_once.py FLAG RECIPE [section.option=value ...]; the file FLAG marks that it has paused.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import wandb

from vit_scale.train import loop

UPDATE, SETTINGS = loop.update, wandb.Settings
FLAG = Path(sys.argv.pop(1))


def update(task, state, batches, **options):  # type: ignore[no-untyped-def]
    if state.step == 5 and not FLAG.exists():
        FLAG.touch()
        time.sleep(120)
    return UPDATE(task, state, batches, **options)


loop.update = update
wandb.Settings = lambda **options: SETTINGS(x_file_stream_transmit_interval=0.1, **options)
sys.argv[0] = "launch/train.py"
runpy.run_path("launch/train.py", run_name="__main__")
