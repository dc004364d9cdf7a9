"""`launch/train.py` that stands still before step 5, the first time that it gets there, for a test to kill it.

W&B's client sends what it has at once, and not every 15 seconds.

Usage: pauses_once.py FLAG RECIPE [section.option=value ...], where FLAG is a file that remembers that it has paused.
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


def update(run, batches):  # type: ignore[no-untyped-def]
    if run.state.step == 5 and not FLAG.exists():
        FLAG.touch()
        time.sleep(120)
    return UPDATE(run, batches)


loop.update = update
wandb.Settings = lambda **options: SETTINGS(x_file_stream_transmit_interval=0.1, **options)
sys.argv[0] = "launch/train.py"
runpy.run_path("launch/train.py", run_name="__main__")
