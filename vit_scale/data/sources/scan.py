"""List the files below a directory: the images, and an account of everything else.

No file is opened, and regular files are not even looked up: names and kinds come from the directory listing. Files are
in the order of their full paths, which is that of `datasets` and the same on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from vit_scale.data.images.file_types import (
    UNSUPPORTED_SUFFIXES,
    how_to_read,
    is_system_file,
    readable_suffixes,
    suffix_of,
)
from vit_scale.errors import UserError
from vit_scale.format import counted, printable

METADATA_NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Tables that describe the images of their directory, by the convention of the Hugging Face Hub."""
_HIDDEN, _NO_FILE, _BAD_NAME = "hidden", "broken links or special files", "with a name that is not valid UTF-8"


class Group(NamedTuple):
    """Consecutive images of one directory."""

    directory: str
    """Relative to the scanned directory; empty for that directory itself."""
    names: list[str]


@dataclass
class Scan:
    """The files below `root`."""

    root: str
    images: list[Group] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)
    """All directories below the root, relative to it, in the order of their paths."""
    metadata: list[str] = field(default_factory=list)
    """Files with a name of METADATA_NAMES."""
    parquet: list[str] = field(default_factory=list)
    """Other parquet files."""
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    """Files that look like images but cannot be read, with the reason: a suffix, `hidden` and so on."""
    others: list[str] = field(default_factory=list)
    """Files that are no images."""

    @property
    def count(self) -> int:
        """Number of images."""
        return sum(len(group.names) for group in self.images)

    def paths(self) -> Iterator[str]:
        """Yield the paths of all images, relative to the root."""
        for directory, names in self.images:
            prefix = f"{directory}/" if directory else ""
            yield from (prefix + name for name in names)


def scan_directory(root: str) -> Scan:
    """List everything below `root`. Symbolic links are followed, except those to a directory that contains them."""
    scan = Scan(root)
    _visit(scan, "", (_identity(root),))
    return scan


def _visit(scan: Scan, directory: str, ancestors: tuple[tuple[int, int], ...]) -> None:
    """Add the files of a directory and, in the order of full paths, of those below it."""
    prefix = f"{directory}/" if directory else ""
    files, below = _list(scan, directory)
    for name in sorted(files + below):
        if not name.endswith("/"):  # "/" marks directories, and sorts them by their full paths
            if not scan.images or scan.images[-1].directory != directory:
                scan.images.append(Group(directory, []))
            scan.images[-1].names.append(name)
            continue
        path = prefix + name[:-1]
        identity = _identity(os.path.join(scan.root, path))
        if identity in ancestors:
            continue  # A link to a directory above: its files are already listed.
        scan.directories.append(path)
        _visit(scan, path, (*ancestors, identity))


def _list(scan: Scan, directory: str) -> tuple[list[str], list[str]]:
    """Return the names of images and of directories, the latter with a final "/"; everything else goes to `scan`."""
    prefix = f"{directory}/" if directory else ""
    readable, images, directories = readable_suffixes(), [], []
    try:
        with os.scandir(os.path.join(scan.root, directory)) as entries:
            for entry in entries:
                name, suffix = entry.name, suffix_of(entry.name)
                if is_system_file(name):
                    # macOS writes a "._" file next to each file on foreign disks.
                    if suffix in readable and not name.startswith("._"):
                        scan.unreadable.append((prefix + name, _HIDDEN))
                elif suffix in readable and entry.is_file():
                    if name.isascii() or _is_utf8(name):
                        images.append(name)
                    else:
                        scan.unreadable.append((prefix + name, _BAD_NAME))
                elif entry.is_dir():
                    _check_directory_name(scan.root, prefix + name)
                    directories.append(f"{name}/")
                else:
                    _add_other(scan, prefix + name, suffix, is_file=entry.is_file())
    except OSError as error:
        raise UserError(f"{os.path.join(scan.root, directory)}: cannot be read: {error.strerror}") from error
    return images, directories


def _add_other(scan: Scan, path: str, suffix: str, *, is_file: bool) -> None:
    if suffix in UNSUPPORTED_SUFFIXES:
        scan.unreadable.append((path, suffix))
    elif suffix in readable_suffixes() and not is_file:
        scan.unreadable.append((path, _NO_FILE))
    elif os.path.basename(path) in METADATA_NAMES:
        scan.metadata.append(path)
    elif suffix == ".parquet":
        scan.parquet.append(path)
    else:
        scan.others.append(path)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_directory_name(root: str, path: str) -> None:
    if not _is_utf8(path):
        raise UserError(f"data.source={root}: the name of directory {printable(path)} is not valid UTF-8; rename it")


def _identity(path: str) -> tuple[int, int]:
    about = os.stat(path)
    return about.st_dev, about.st_ino


def describe_skipped(unreadable: list[tuple[str, str]], others: list[str]) -> str:
    """`12 files skipped: 8 .heic (install pillow-heif), 4 not images (.txt)`; empty if there are none."""
    parts = describe_unreadable(unreadable)
    if others:
        kinds = sorted({suffix_of(os.path.basename(path)) or "no suffix" for path in others})
        shown = ", ".join(kinds[:5]) + (", ..." if len(kinds) > 5 else "")
        parts = [*parts, f"{'1 not an image' if len(others) == 1 else f'{len(others):,} not images'} ({shown})"]
    return f"{counted(len(unreadable) + len(others), 'file')} skipped: {', '.join(parts)}" if parts else ""


def describe_unreadable(unreadable: list[tuple[str, str]]) -> list[str]:
    """`8 .heic (install pillow-heif)` and so on, one text per reason."""
    reasons = sorted({reason for _, reason in unreadable})
    texts = []
    for reason in reasons:
        paths = [path for path, why in unreadable if why == reason]
        texts.append(f"{len(paths):,} {reason} ({how_to_read(reason) or printable(paths[0])})")
    return texts
