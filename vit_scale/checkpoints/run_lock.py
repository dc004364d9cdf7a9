"""One run at a time per directory: a lock that the system releases when its process ends, for whatever reason.

It is a record lock, which belongs to one process only: data-loading workers that outlive a killed process do not
inherit it.
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

_locks: dict[Path, IO[str]] = {}


def acquire(run_dir: Path) -> None:
    """Lock `run_dir` for this process; raise `UserError` if another process trains in it.

    File systems without locks are not protected.
    """
    if fcntl is None or run_dir.resolve() in _locks:
        return
    try:
        file = (run_dir / ".lock").open("a+")
    except OSError:
        return
    if not _lock(file):
        file.seek(0)
        pid = file.read().strip() or "unknown"
        raise UserError(f"{run_dir} is in use by process {pid}.\nWait for it to finish, or choose another run.dir.")
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    _locks[run_dir.resolve()] = file


def is_in_use(run_dir: Path) -> bool:
    """Return whether another process trains in `run_dir`."""
    if fcntl is None or run_dir.resolve() in _locks or not (run_dir / ".lock").exists():
        return False
    with (run_dir / ".lock").open("a+") as file:
        return not _lock(file)


def _lock(file: IO[str]) -> bool:
    """Return False if another process has the lock; a file system without locks grants it to every process."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def release_all() -> None:
    """Unlock every run directory that this process has locked."""
    for run_dir in list(_locks):
        release(run_dir)


def release(run_dir: Path) -> None:
    """Unlock `run_dir`, if this process has locked it."""
    file = _locks.pop(run_dir.resolve(), None)
    if file is not None:
        file.close()
