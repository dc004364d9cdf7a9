"""`launch/train.py` whose last rank kills itself during step 5, the first time.

Usage: dies_once.py FLAG RECIPE [section.option=value ...]; the file FLAG marks that it has died.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from vit_scale.train import loop

UPDATE = loop.update
FLAG = Path(sys.argv.pop(1))


def update(task, state, batches, **options):  # type: ignore[no-untyped-def]
    last = state.engine.rank == state.engine.world - 1
    if last and state.step == 5 and not FLAG.exists():
        FLAG.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return UPDATE(task, state, batches, **options)


loop.update = update
sys.argv[0] = "launch/train.py"
runpy.run_path("launch/train.py", run_name="__main__")
