"""The teacher's logits of all training images, computed once before training: `distill.cache`.

<cache_dir>/teacher-<key>/logits.bin  fp32 [images, classes], in the order of the source
                          done.bin    uint8 per chunk of images: 1 when its logits are written
                          about.json  what they were computed from

Chunks that an interrupted computation has written are kept. Ranks share the chunks, and the first rank of each node
writes all of them, so it does not matter whether nodes share a file system.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vit_scale.config import Config
from vit_scale.data.augment.transforms import TrainTransform
from vit_scale.data.batch import ImageSource
from vit_scale.data.loading.loaders import Loading, TrainLoader
from vit_scale.data.sampling import Ints, TrainIndices, sample_index
from vit_scale.data.sources.cache import cache_root, digest, with_cache
from vit_scale.errors import UserError
from vit_scale.files import write_text
from vit_scale.launcher import is_main_process

if TYPE_CHECKING:
    from vit_scale.data.data import Data
    from vit_scale.tasks.distill.distillation import Distillation

_FORMAT = 1
CHUNK = 128
"""Images of a forward pass of the teacher."""
_FLUSH_EVERY = 16
"""Rounds over all ranks after which what was computed is safe from a kill."""


@dataclass(frozen=True)
class LogitCache:
    """Logits by training position."""

    table: Any
    """Memory map, fp32 [images, classes]."""
    seed: int
    repeats: int

    def logits(self, positions: Tensor) -> Tensor:
        """Return the logits [B, C] of the images at these positions."""
        index = sample_index(self.seed, positions.cpu().numpy(), len(self.table), self.repeats)
        return torch.from_numpy(self.table[index])


@dataclass(frozen=True, kw_only=True)
class Chunks(TrainIndices):
    """The images of some chunks, in order; the last chunk is padded with its last image."""

    chunks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[tuple[Ints, Ints]]:
        for chunk in self.chunks:
            index = np.minimum(np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.int64), self.images - 1)
            yield index, index


def check_fixed_inputs(config: Config) -> None:
    """Raise `UserError` if the images that the teacher sees vary from epoch to epoch, naming the options."""
    augment, data = config.augment, config.data
    varying = {
        "augment.crop": augment.crop != "none" and augment.crop,
        "augment.interpolation": augment.interpolation == "random" and "random",
        "augment.hflip": augment.hflip,
        "augment.vflip": augment.vflip,
        "augment.color_jitter": augment.color_jitter,
        "augment.three_augment": augment.three_augment,
        "augment.rand_augment": augment.rand_augment,
        "augment.rand_magnitude": augment.rand_magnitude,
        "augment.erase": augment.erase,
        "augment.mixup": augment.mixup,
        "augment.cutmix": augment.cutmix,
        "data.on_error": data.on_error == "skip" and "skip",
    }
    found = [f"{name} = {value}" for name, value in varying.items() if value]
    if found:
        raise UserError(
            f"distill.cache = true: the teacher's images are not the same in every epoch: {', '.join(found)}.\n"
            "Switch these off (augment.crop=none, augment.interpolation=bicubic, ...), or set distill.cache=false"
        )
    others = {
        "data.streaming": data.streaming,
        "data.balance": data.balance,
        "distill.features": config.distill.features,
    }
    if unsupported := [name for name, value in others.items() if value]:
        raise UserError(f"distill.cache = true: not supported with {unsupported[0]}; set distill.cache=false")


def open_cache(task: Distillation, data: Data, workers: int) -> LogitCache:
    """Return the logits of all training images; compute those that are missing. All ranks must call it."""
    assert task.teacher is not None
    config, source = task.config, data.train
    shape = (len(source), task.num_classes)
    made_from = {
        "format": _FORMAT,
        "teacher": task.teacher.sha256,
        "precision": str(task.teacher.dtype),
        "images": digest(source),
        "shape": shape,
        "size": task.img_size,
        "channels": task.in_chans,
        "normalization": task.normalization,
        "interpolation": config.augment.interpolation,
        "decoded": (config.data.cache, config.data.cache_size),
    }
    key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    directory = cache_root(config.data) / f"teacher-{key}"
    table, done = _open_files(directory, made_from, shape)
    if missing := _missing(done, task.device):
        decoded = with_cache(
            source, config.data, img_size=task.img_size, in_chans=task.in_chans, target=task.make_target(config)
        )
        _compute(task, decoded, table, done, missing, workers)
    return LogitCache(table, config.run.seed, config.augment.repeats)


def _open_files(directory: Path, made_from: dict[str, Any], shape: tuple[int, int]) -> tuple[np.memmap, np.memmap]:
    """Return memory maps of the logits and of the flags, with disk space for all of them."""
    chunks = -(-shape[0] // CHUNK)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, size in (("logits.bin", 4 * shape[0] * shape[1]), ("done.bin", chunks)):
            descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _reserve(descriptor, size)
            finally:
                os.close(descriptor)
        if is_main_process():
            write_text(directory / "about.json", json.dumps(made_from, indent=2))
    except OSError as error:
        raise UserError(
            f"distill.cache = true: {directory}: {error.strerror}; it needs {4 * shape[0] * shape[1] / 1e9:.2g} GB. "
            "Choose another data.cache_dir"
        ) from error
    table = np.memmap(directory / "logits.bin", np.float32, mode="r+", shape=shape)
    return table, np.memmap(directory / "done.bin", np.uint8, mode="r+", shape=(chunks,))


def _reserve(descriptor: int, size: int) -> None:
    """Give a file its full size; a memory map that finds the disk full while it is written ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    elif os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)


def _missing(done: np.memmap, device: torch.device) -> list[int]:
    """Return the chunks that are not written on every node."""
    flags = torch.from_numpy(np.array(done)).to(device)
    if dist.is_initialized():
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return (flags == 0).nonzero().flatten().tolist()


def _compute(
    task: Distillation, source: ImageSource, table: np.memmap, done: np.memmap, missing: list[int], workers: int
) -> None:
    """Compute the logits of `missing` chunks: in each round one chunk per rank."""
    from tqdm import tqdm

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    writes = os.environ.get("LOCAL_RANK", "0") == "0"
    rounds = [missing[i : i + world] for i in range(0, len(missing), world)]
    own = tuple(chunks[min(rank, len(chunks) - 1)] for chunks in rounds)
    bar = tqdm(
        total=len(missing) * CHUNK,
        desc="computing the teacher's logits",
        unit="image",
        disable=rank > 0 or not sys.stderr.isatty(),
    )
    loader = _loader(task, source, own, workers)
    try:
        for number, (chunks, batch) in enumerate(zip(rounds, loader, strict=True), 1):
            for chunk, logits in zip(chunks, _of_all_ranks(_logits(task, batch)), strict=False):
                if writes:
                    rows = table[chunk * CHUNK : (chunk + 1) * CHUNK]
                    rows[:] = logits[: len(rows)].cpu().numpy()
            bar.update(CHUNK * len(chunks))
            if writes and (number % _FLUSH_EVERY == 0 or number == len(rounds)):
                table.flush()  # before the flags that say so
                done[[chunk for chunks in rounds[:number] for chunk in chunks]] = 1
                done.flush()
    finally:
        bar.close()
        loader.close()
    if world > 1:
        dist.barrier()  # nobody reads what is not written yet


def _logits(task: Distillation, batch: Any) -> Tensor:
    assert task.teacher is not None
    return task.teacher(task.normalized(batch)).logits


def _loader(task: Distillation, source: ImageSource, chunks: tuple[int, ...], workers: int) -> TrainLoader:
    config, images = task.config, len(source)
    indices = Chunks(global_batch=CHUNK, micro_batch=CHUNK, end_step=len(chunks), seed=0, images=images, chunks=chunks)
    transform = TrainTransform(config.augment, task.img_size, *task.normalization)
    loading = Loading(task.in_chans, config.data.on_error, workers, reserved_batches=1)
    return TrainLoader(source, transform, indices, task.make_target(config), loading)


def _of_all_ranks(logits: Tensor) -> list[Tensor]:
    """Return the logits that each rank has computed."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [logits]
    gathered = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, logits.contiguous())
    return gathered
