"""Stands in for launch/train.py where only the sweep is under test: takes the same options, writes the same files.

Four evaluations; the better, the nearer `optim.lr` is to 1e-3. Variables change how it behaves:
STUB_FAIL_BELOW (a learning rate) fails, STUB_HANG_AFTER (an evaluation) waits there for SIGTERM unless it is 1e-3,
STUB_METRIC names what is logged.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

EVALUATIONS = 4


def main() -> int:
    options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[2:])
    lr, folder = float(options["optim.lr"]), Path(options["run.dir"])
    print("started with", sys.argv[1:], flush=True)
    if lr < float(os.environ.get("STUB_FAIL_BELOW", "0")):
        print("error: the learning rate is too low", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(options))
    metrics = folder / "metrics.jsonl"
    before = metrics.read_text().splitlines() if metrics.exists() else []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for step in range(len(before) + 1, EVALUATIONS + 1):
        value = (1 - abs(math.log10(lr / 1e-3)) / 4) * (0.5 + 0.5 * step / EVALUATIONS)
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, os.environ.get("STUB_METRIC", "val/top1"): value}) + "\n")
        if lr != 1e-3 and step == int(os.environ.get("STUB_HANG_AFTER", "0")):
            time.sleep(300)
    return 0


if __name__ == "__main__":
    sys.exit(main())
