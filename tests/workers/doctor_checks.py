"""Checks that behave badly, for tests/doctor/test_isolation.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from vit_scale.doctor.check import Check, Setup, works
from vit_scale.errors import UserError


def good(setup: Setup, value: str = "fine") -> Check:
    return works("good", value, process=os.getpid())


def several(setup: Setup) -> list[Check]:
    return [works(f"several {i}", "") for i in range(3)]


def illegal_instruction(setup: Setup) -> Check:
    setup.stage("multiplying in bf16")
    os.kill(os.getpid(), signal.SIGILL)
    raise AssertionError


def leaves(setup: Setup) -> Check:
    print("the last words")
    os._exit(3)


def hangs(setup: Setup) -> Check:
    setup.stage("waiting for the driver")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(100)
    Path(setup.scratch, "hanging.pid").write_text(str(os.getpid()))
    time.sleep(100)
    raise AssertionError


def raises(setup: Setup) -> Check:
    raise RuntimeError("operator torchvision::nms does not exist\nand more")


def refuses(setup: Setup) -> Check:
    raise UserError("No strategy of that name.\nUse another.")


def last_rank_fails(setup: Setup) -> Check:
    if os.environ["RANK"] == "1":
        raise ValueError("only rank 1 knows why")
    time.sleep(100)
    raise AssertionError


def last_rank_dies(setup: Setup) -> Check:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
    raise AssertionError


def ranks(setup: Setup) -> Check:
    return works("ranks", f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
