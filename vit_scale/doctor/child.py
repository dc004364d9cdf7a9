"""Run checks in this process and write each result to a file: `python -m vit_scale.doctor.child JOB.json`.

Whatever a check does to this process, the parent (isolation.py) survives it and knows which check it was.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from vit_scale.doctor.check import Check, Setup, broken
from vit_scale.errors import UserError, first_line
from vit_scale.launcher import silence_libraries, world_size

FAILED_RANK_EXIT_CODE = 70


def main() -> None:
    """Run the checks of the job file; under several ranks, the results of rank 0 count."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank, several_ranks = int(os.environ.get("RANK", "0")), world_size() > 1
    setup = Setup(**job["setup"] | {"events": f"{job['events']}-{rank}"})
    silence_libraries()
    for number, probe in enumerate(job["probes"]):
        setup.emit({"start": number})
        started = time.perf_counter()
        try:
            checks = call(probe, setup)
        except Exception as error:  # noqa: BLE001 -- whatever fails is the result of the check
            checks = [describe_error(probe, error)]
            traceback.print_exc()
            if several_ranks:
                # The other ranks may wait for this one: the parent ends them.
                setup.emit({"failed": [dataclasses.asdict(check) for check in checks]})
                _exit(FAILED_RANK_EXIT_CODE)
        seconds = round(time.perf_counter() - started, 2)
        done = [dataclasses.asdict(dataclasses.replace(check, seconds=seconds)) for check in checks]
        setup.emit({"end": number, "checks": done})
    # Without waiting for threads of libraries, or for a communicator.
    _exit(0)


def call(probe: dict[str, Any], setup: Setup) -> list[Check]:
    """Call the function of a probe, given as `module:function`, and return its results."""
    module, function = probe["function"].split(":")
    found = getattr(importlib.import_module(module), function)(setup, **probe["arguments"])
    return [found] if isinstance(found, Check) else list(found)


def describe_error(probe: dict[str, Any], error: Exception) -> Check:
    """Return the check that `error` ended."""
    if isinstance(error, UserError):
        message, _, advice = str(error).partition("\n")
    else:
        message, advice = f"{type(error).__name__}: {first_line(error)}", ""
    return broken(probe["name"], message.rstrip("."), advice or probe["advice"], required=probe["required"])


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
