"""Batches for training and evaluation, made by worker processes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data import draws
from vit_scale.data.decode import decode
from vit_scale.data.sampling import eval_places, sample_index, step_positions
from vit_scale.data.sample import ImageSource as Source
from vit_scale.data.transforms import SLOTS, eval_transform, train_transform


@dataclass
class Batch:
    """A micro batch."""

    images: torch.Tensor
    """uint8 [m, C, H, W]; channels last in memory."""
    labels: torch.Tensor
    """int64 [m]"""
    positions: torch.Tensor
    """int64 [m], global positions."""

    def pin_memory(self) -> Batch:
        """Called by DataLoader where there is a GPU."""
        return Batch(self.images.pin_memory(), self.labels.pin_memory(), self.positions)


class _TrainBatches(Dataset):
    def __init__(self, source: Source, augment: AugmentConfig, img_size: tuple[int, int], in_chans: int, seed: int):
        self.source, self.augment, self.img_size, self.in_chans, self.seed = source, augment, img_size, in_chans, seed

    def __getitem__(self, places: tuple[np.ndarray, np.ndarray]) -> Batch:
        positions, indices = places
        u = draws.uniforms(self.seed, positions, SLOTS)
        out = np.empty((len(positions), *self.img_size, self.in_chans), np.uint8)
        labels = np.empty(len(positions), np.int64)
        for i, index in enumerate(indices):
            sample = self.source.read(int(index))
            image = train_transform(decode(sample.image, self.in_chans), self.img_size, self.augment, u[i].tolist())
            out[i] = image.reshape(*self.img_size, self.in_chans)
            labels[i] = sample.label
        images = torch.from_numpy(out).permute(0, 3, 1, 2)
        return Batch(images, torch.from_numpy(labels), torch.from_numpy(positions))


class TrainLoader:
    """Micro batches of this process from `start_step` to `end_step`, in one pass over all epochs."""

    def __init__(
        self,
        source: Source,
        *,
        augment: AugmentConfig,
        img_size: tuple[int, int],
        in_chans: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world: int,
        seed: int,
        workers: int,
        end_step: int,
        start_step: int = 0,
        on_error: str = "raise",
    ):
        self.problems: Counter[str] = Counter()
        self._places = _Places(len(source), augment.repeats, global_batch, micro_batch, rank, world, seed, start_step, end_step)
        self._loader = DataLoader(
            _TrainBatches(source, augment, img_size, in_chans, seed),
            sampler=self._places,
            batch_size=None,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
        )

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def close(self) -> None:
        """Stop the workers."""


@dataclass
class _Places:
    n: int
    repeats: int
    global_batch: int
    micro_batch: int
    rank: int
    world: int
    seed: int
    start_step: int
    end_step: int

    def __len__(self) -> int:
        return (self.end_step - self.start_step) * self.global_batch // self.world // self.micro_batch

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.start_step, self.end_step):
            for positions in step_positions(step, self.global_batch, self.rank, self.world, self.micro_batch):
                yield positions, sample_index(self.seed, positions, self.n, self.repeats)


class _EvalBatches(Dataset):
    def __init__(self, source: Source, augment: AugmentConfig, img_size: tuple[int, int], in_chans: int):
        self.source, self.augment, self.img_size, self.in_chans = source, augment, img_size, in_chans

    def __getitem__(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out = np.zeros((len(indices), *self.img_size, self.in_chans), np.uint8)
        labels = np.zeros(len(indices), np.int64)
        for i, index in enumerate(indices):
            if index >= 0:
                sample = self.source.read(int(index))
                image = eval_transform(decode(sample.image, self.in_chans), self.img_size, self.augment)
                out[i] = image.reshape(*self.img_size, self.in_chans)
                labels[i] = sample.label
        weights = torch.from_numpy((indices >= 0).astype(np.float32))
        return torch.from_numpy(out).permute(0, 3, 1, 2), torch.from_numpy(labels), weights


class EvalLoader:
    """Each image exactly once over all processes; full batches on every process, padded with weight 0."""

    def __init__(
        self,
        source: Source,
        *,
        augment: AugmentConfig,
        img_size: tuple[int, int],
        in_chans: int,
        batch: int,
        rank: int,
        world: int,
        workers: int,
        on_error: str = "raise",
    ):
        places = eval_places(len(source), batch, rank, world)
        self.problems: Counter[str] = Counter()
        self._loader = DataLoader(
            _EvalBatches(source, augment, img_size, in_chans),
            sampler=places,
            batch_size=None,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return iter(self._loader)

    def close(self) -> None:
        """Stop the workers."""


def choose_workers(config: DataConfig, processes_on_this_machine: int, source: Source) -> int:
    """Workers for each training process."""
    if config.workers != "auto":
        return config.workers
    return max(0, min(8, (os.cpu_count() or 1) // processes_on_this_machine))
