"""One run at a time in a folder: a lock that the system releases when its process ends, however it ends.

It is a record lock, which belongs to the process alone: loading processes that outlive a killed one do not keep it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO

from vit_scale.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_held: dict[Path, IO[str]] = {}


def hold(folder: Path) -> None:
    """Keep `folder` for this process; raises `UserError` where another trains in it.

    Disks that know no locks are not protected.
    """
    if fcntl is None or folder.resolve() in _held:
        return
    try:
        file = (folder / ".lock").open("a+")
    except OSError:
        return
    if not _lock(file):
        file.seek(0)
        who = file.read().strip() or "another"
        raise UserError(f"{folder} is in use: process {who} trains there.\nWait for it, or choose another run.dir.")
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    _held[folder.resolve()] = file


def is_in_use(folder: Path) -> bool:
    """Whether another process trains in `folder`."""
    if fcntl is None or folder.resolve() in _held or not (folder / ".lock").exists():
        return False
    with (folder / ".lock").open("a+") as file:
        return not _lock(file)


def _lock(file: IO[str]) -> bool:
    """False where another process has it; a disk without locks gives it to everybody."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def release(folder: Path) -> None:
    """Let others have it."""
    file = _held.pop(folder.resolve(), None)
    if file is not None:
        file.close()
