"""Stub of launch/train.py for testing sweeps only: takes the same options and writes the same files.

Runs four evaluations; the closer `optim.lr` is to 1e-3, the better. Environment variables change its behavior:
STUB_FAIL_BELOW: fail below this learning rate; STUB_HANG_AFTER: wait for SIGTERM after this evaluation unless the
learning rate is 1e-3; STUB_METRIC: name of the logged metric.
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
