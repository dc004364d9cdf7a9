"""A decoded copy of the training images: written once, then a memory map shared by all workers and processes.

<cache_dir>/<key>/pixels.bin   uint8 [H, W, C] of all images, one after another
                  shapes.npy   height and width of each; 0 x 0 for an image that could not be decoded
                  cache.json   what it was made from; the directory gets its name only when everything is written
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from vit_scale.config import DataConfig
from vit_scale.data.augment.geometry import shorter_side_size
from vit_scale.data.augment.resize import resize
from vit_scale.data.batch import ImageSource, Sample
from vit_scale.data.images.decode import UnreadableImage, open_image
from vit_scale.data.sources.streams import StreamSource
from vit_scale.data.spatial_targets import BoxTarget
from vit_scale.data.targets import Target
from vit_scale.errors import UserError

Shapes = npt.NDArray[np.int64]

_FORMAT = 1
_CHUNK = 64  # Images that a worker decodes before returning them.
_MARGIN = 1.15  # Times the model's image size: some detail to crop from.


@dataclass(frozen=True)
class CachedSource:
    """The decoded copy of a source."""

    source: ImageSource
    directory: Path
    channels: int

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, index: int) -> Sample:
        """Return pixels [H, W, C], a view of the memory map, and the target."""
        height, width = self._shapes[index]
        pixels = self._pixels[self._starts[index] : self._starts[index + 1]]
        return Sample(pixels.reshape(height, width, self.channels), self.source.read_target(index))

    def read_target(self, index: int) -> Any:
        """Return the target alone."""
        return self.source.read_target(index)

    def describe(self, index: int) -> str:
        """Name an image in messages as the source does."""
        return self.source.describe(index)

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Class indices of all images; None if the target is not a class."""
        return self.source.labels

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name

    @cached_property
    def _shapes(self) -> Shapes:
        return np.load(self.directory / "shapes.npy")

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self._shapes.prod(axis=1) * self.channels)])

    @cached_property
    def _pixels(self) -> npt.NDArray[np.uint8]:
        if self._starts[-1] == 0:
            return np.empty(0, np.uint8)
        return np.memmap(self.directory / "pixels.bin", np.uint8, mode="r").view(np.ndarray)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}


def with_cache(
    source: ImageSource, config: DataConfig, *, img_size: tuple[int, int], in_chans: int, target: Target | None = None
) -> ImageSource:
    """Return the decoded copy of a source, written now unless it exists, if `data.cache` requests it.

    Use it for training images only. Evaluation reads the originals, so that no accuracy depends on a cache.
    """
    if config.cache == "none":
        return source
    if isinstance(source, StreamSource):
        raise UserError("data.cache=decoded: a stream cannot be cached; set data.streaming=false or data.cache=none")
    if isinstance(target, BoxTarget):
        raise UserError("data.cache=decoded: cached images are smaller than their boxes; set data.cache=none")
    from filelock import FileLock

    side = config.cache_size or round(_MARGIN * min(img_size))
    made_from = {"format": _FORMAT, "source": digest(source), "size": side, "channels": in_chans, "images": len(source)}
    root = cache_root(config)
    directory = root / hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    # Of several processes on a node one writes, the others wait for it.
    with FileLock(f"{directory}.lock"):
        if not _is_complete(directory, made_from):
            _write(source, directory, made_from, side, in_chans, config.on_error)
    return CachedSource(source, directory, in_chans)


def digest(source: ImageSource) -> str:
    """Return a fingerprint of images and labels, which changes with files, tables and the choice of rows."""
    labels = source.labels
    state = hashlib.sha256(b"" if labels is None else np.ascontiguousarray(labels).tobytes())
    dataset, rows = getattr(source, "dataset", None), getattr(source, "rows", None)
    if dataset is not None:
        state.update(dataset._fingerprint.encode())
    if rows is not None:
        state.update(np.ascontiguousarray(rows).tobytes())
    first = source.read(0).image
    if isinstance(first, str):
        for index in range(len(source)):
            path = source.read(index).image
            about = os.stat(path) if os.path.exists(path) else None
            state.update(f"{path} {about and about.st_size} {about and about.st_mtime_ns}\n".encode())
    else:
        state.update(first.tobytes() if isinstance(first, np.ndarray) else bytes(first))
    return state.hexdigest()


def cache_root(config: DataConfig) -> Path:
    """Return the directory of caches, `data.cache_dir` or the default, created if it does not exist."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vit_scale"
    root = Path(config.cache_dir).expanduser() if config.cache_dir else default
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir={root}: {error.strerror}; choose a writable directory") from error
    return root


def _is_complete(directory: Path, made_from: dict[str, Any]) -> bool:
    try:
        found = json.loads((directory / "cache.json").read_text())
        complete = found["bytes"] == (directory / "pixels.bin").stat().st_size and (directory / "shapes.npy").exists()
    except (OSError, ValueError, KeyError):
        return False
    return complete and found["made_from"] == made_from


def _write(
    source: ImageSource, directory: Path, made_from: dict[str, Any], side: int, channels: int, on_error: str
) -> None:
    """Decode everything into a directory of another name, then rename it: a copy is complete or absent."""
    from tqdm import tqdm

    partial = directory.with_suffix(".partial")
    for leftover in (partial, directory):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    shapes: list[Shapes] = []
    bytes_written = 0
    chunks = _decoded_chunks(source, side, channels, on_error)
    bar = tqdm(total=len(source), desc="decoding images for data.cache", unit="image", disable=not sys.stderr.isatty())
    with bar, open(partial / "pixels.bin", "wb") as file:
        for pixels, chunk_shapes, error in chunks:
            if error is not None:
                shutil.rmtree(partial)
                raise UserError(error)
            shapes.append(chunk_shapes)
            if len(shapes) == 1:
                _check_disk_space(partial, len(pixels) / len(chunk_shapes) * len(source))
            file.write(pixels.numpy())
            bytes_written += len(pixels)
            bar.update(len(chunk_shapes))
    np.save(partial / "shapes.npy", np.concatenate(shapes))
    (partial / "cache.json").write_text(json.dumps({"made_from": made_from, "bytes": bytes_written}, indent=2))
    partial.rename(directory)


def _check_disk_space(directory: Path, needed: float) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        shutil.rmtree(directory)
        raise UserError(
            f"data.cache=decoded: needs about {needed / 1e9:.0f} GB, but only {free / 1e9:.0f} GB are free in "
            f"{directory.parent}; choose another data.cache_dir or a smaller data.cache_size"
        )


def _decoded_chunks(source: ImageSource, side: int, channels: int, on_error: str) -> Any:
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chunks = range(0, len(source), _CHUNK)
    return DataLoader(
        _Chunks(source, side, channels, on_error),
        sampler=chunks,
        batch_size=None,
        num_workers=workers if len(chunks) > 2 * workers else 0,
    )


class _Chunks(Dataset[tuple[torch.Tensor, Shapes, str | None]]):
    """Consecutive images, decoded, resized to the side and concatenated."""

    def __init__(self, source: ImageSource, side: int, channels: int, on_error: str):
        self.source, self.side, self.channels, self.on_error = source, side, channels, on_error

    def __getitem__(self, start: int) -> tuple[torch.Tensor, Shapes, str | None]:
        images = []
        for index in range(start, min(start + _CHUNK, len(self.source))):
            try:
                images.append(decode_small(self.source.read(index).image, self.side, self.channels))
            except UnreadableImage as error:
                if self.on_error == "raise":
                    advice = "set data.on_error=skip to skip unreadable images"
                    return torch.empty(0), np.empty(0, np.int64), f"{self.source.describe(index)}: {error}; {advice}"
                images.append(np.empty((0, 0, self.channels), np.uint8))
        pixels = np.concatenate([image.reshape(-1) for image in images])
        return torch.from_numpy(pixels), np.array([image.shape[:2] for image in images], np.int64), None


def decode_small(data: Any, side: int, channels: int) -> npt.NDArray[np.uint8]:
    """Return pixels [H, W, C] with a shorter side of `side`, unchanged if they are not larger."""
    image = open_image(data, channels)
    height, width = image.height, image.width
    if min(height, width) > side:
        height, width = shorter_side_size(height, width, (side, side))
    # At twice the size needed, decoding at a smaller scale leaves no visible trace.
    pixels = image.crop((0, 0, image.width, image.height), (2 * height, 2 * width))
    return np.ascontiguousarray(resize(pixels, (height, width), "bicubic").transpose(1, 2, 0))
