"""Atomic writes, and why a write failed."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success it replaces `path`, on an exception it is removed.

    A reader sees the old file or the new one, never a part of it.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def describe_write_error(error: Exception, folder: Path, sizes: dict[str, int]) -> str:
    """Describe why files of these `sizes` in bytes could not be written to `folder`, with the disk space missing."""
    number = _errno(error)
    if number in (errno.ENOSPC, errno.EDQUOT):
        here = folder if folder.is_dir() else folder.parent
        written = sum(path.stat().st_size for path in here.glob("*") if path.name in sizes)
        free = shutil.disk_usage(here).free + written
        return f"{error}: {_missing(sum(sizes.values()), free)} free on the disk"
    if number == errno.EFBIG:
        return f"{error}: {_missing(max(sizes.values(), default=0), _largest_file())} allowed for a file (ulimit -f)"
    return str(error) or type(error).__name__


def _errno(error: Exception) -> int | None:
    """Return the system error number, which safetensors reports in its message only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found.group(1)) if found else None


def _largest_file() -> int:
    import resource  # Unix only

    return resource.getrlimit(resource.RLIMIT_FSIZE)[0]


def _missing(needed: int, available: int) -> str:
    missing = max(0, needed - available)
    return f"{_size(missing)} are missing, {_size(needed)} are needed, {_size(available)} are"


def _size(number: int) -> str:
    return f"{number / 1e6:,.1f} MB" if number >= 1e5 else f"{number:,} bytes"
