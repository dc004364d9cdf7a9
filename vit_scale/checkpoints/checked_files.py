"""Files with a checksum of what they should hold.

The checksum is taken from memory while a file is written, so it also tells of bytes that went wrong on their way to
the disk. CRC-32 finds damage, which is all it is for, at a third of the cost of a cryptographic hash.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Entry = dict[str, int]
"""What a manifest says of a file: its `bytes` and `crc32`."""


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Entry:
    """Write a safetensors file through to the disk; the tensors are contiguous and in host memory."""
    save_file(tensors, path, metadata)
    path.chmod(0o644)  # safetensors leaves its files to their owner alone
    to_disk(path)
    with safe_open(path, framework="pt") as file:  # raises where the file is shorter than its header says
        file.metadata()
    return {"bytes": path.stat().st_size, "crc32": _checksum_in_memory(path, tensors)}


def write_json(path: Path, content: Any) -> Entry:
    """Write a JSON file through to the disk."""
    text = json.dumps(content, indent=1, default=str).encode()
    path.write_bytes(text)
    to_disk(path)
    return {"bytes": len(text), "crc32": zlib.crc32(text)}


def damage(path: Path, entry: Entry) -> str | None:
    """None for a file that is as it was written, else what is wrong with it."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{path.name} has {path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
    return None if checksum(path) == entry["crc32"] else f"{path.name} does not match its checksum"


def checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def to_disk(*paths: Path) -> None:
    """A rename must not reach the disk before the bytes it names."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _checksum_in_memory(path: Path, tensors: dict[str, torch.Tensor]) -> int:
    """Of the file's header, and of the tensors in the order that the header gives."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
    places = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name in tensors}
    value = zlib.crc32(length + header)
    for name in sorted(places, key=places.__getitem__):
        value = zlib.crc32(memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy()), value)  # type: ignore[arg-type]
    return value
