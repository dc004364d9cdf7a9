"""`launch/train.py` whose last process kills itself during step 5, the first time that it gets there.

Usage: dies_once.py FLAG RECIPE [section.option=value ...], where FLAG is a file that remembers that it has died.
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


def update(run, batches):  # type: ignore[no-untyped-def]
    last = run.state.engine.rank == run.state.engine.world - 1
    if last and run.state.step == 5 and not FLAG.exists():
        FLAG.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return UPDATE(run, batches)


loop.update = update
sys.argv[0] = "launch/train.py"
runpy.run_path("launch/train.py", run_name="__main__")
