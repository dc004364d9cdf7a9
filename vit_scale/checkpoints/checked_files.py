"""Files with a checksum of their intended content.

The checksum is computed from memory while a file is written, so it also detects bytes that were corrupted on their way
to the disk. CRC-32 detects accidental corruption, its only purpose here, at a third of the cost of a cryptographic
hash.
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
"""The entry of a file in a manifest: `bytes` and `crc32`."""


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Entry:
    """Write a safetensors file and flush it to disk; the tensors are contiguous and in host memory."""
    save_file(tensors, path, metadata)
    path.chmod(0o644)  # safetensors makes its files readable by their owner only
    flush_to_disk(path)
    with safe_open(path, framework="pt") as file:  # raises if the file is shorter than its header says
        file.metadata()
    return {"bytes": path.stat().st_size, "crc32": _checksum_in_memory(path, tensors)}


def write_json(path: Path, content: Any) -> Entry:
    """Write a JSON file and flush it to disk."""
    text = json.dumps(content, indent=1, default=str).encode()
    path.write_bytes(text)
    flush_to_disk(path)
    return {"bytes": len(text), "crc32": zlib.crc32(text)}


def corruption_error(path: Path, entry: Entry) -> str | None:
    """Return how a file differs from its manifest entry, or None if it is intact."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{path.name} has {path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
    return None if checksum(path) == entry["crc32"] else f"{path.name} does not match its checksum"


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def flush_to_disk(*paths: Path) -> None:
    """Call fsync on files or directories: a rename must not reach the disk before the bytes it names."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _checksum_in_memory(path: Path, tensors: dict[str, torch.Tensor]) -> int:
    """Return the checksum of the file's header, followed by the tensors in the order that the header gives."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
    places = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name in tensors}
    value = zlib.crc32(length + header)
    for name in sorted(places, key=places.__getitem__):
        value = zlib.crc32(memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy()), value)  # type: ignore[arg-type]
    return value
