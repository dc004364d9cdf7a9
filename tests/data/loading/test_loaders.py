"""Batches are the same for any number of workers, processes and interruptions; failures end with a message."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.batch import Batch, Sample
from vit_scale.data.data import Data, open_data
from vit_scale.data.loading.loaders import EvalLoader, TrainLoader
from vit_scale.data.loading.workers import choose_workers
from vit_scale.data.sampling import sample_index
from vit_scale.errors import UserError

Build = Callable[..., TrainLoader]
BuildEval = Callable[..., EvalLoader]
EVERYTHING = AugmentConfig(
    rand_augment="rand-m9-mstd0.5-inc1",
    erase=0.5,
    color_jitter=0.3,
    three_augment=True,
    vflip=0.3,
    interpolation="random",
)


def joined(loader: Iterable[Batch]) -> dict[int, tuple[bytes, int]]:
    """Return pixels and label by position."""
    found = {}
    for batch in loader:
        assert batch.images.dtype == torch.uint8
        for image, label, position in zip(batch.images, batch.target["label"], batch.positions, strict=True):
            found[int(position)] = image.numpy().tobytes(), int(label)
    return found


@pytest.fixture
def reference(digits: Data, train_loader: Build) -> dict[int, tuple[bytes, int]]:
    """Four steps of 16 images, in one process without workers."""
    found = joined(train_loader(digits.train, augment=EVERYTHING))
    assert sorted(found) == list(range(64))
    return found


GOLDEN = {
    "everything": (0xF35BA7E2, EVERYTHING, (8, 8)),
    "resized": (0x56C5587E, AugmentConfig(crop_scale=(0.3, 1.0), vflip=0.5), (12, 10)),
    "padded": (0x8D8B8B29, AugmentConfig(crop="random", crop_padding=2), (8, 8)),
    "black": (0xE1414702, AugmentConfig(crop="random", crop_padding=3, crop_border="black"), (12, 10)),
    "center": (0xE969DA22, AugmentConfig(crop="none", interpolation="bilinear"), (6, 10)),
    "repeats": (0x43AF7C93, AugmentConfig(repeats=3), (8, 8)),
}
"""Checksums of batches, recorded before crops and flips were drawn as a Geometry."""


def checksum(arrays: Iterable[np.ndarray]) -> int:
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return value


@pytest.mark.parametrize("name", list(GOLDEN))
def test_training_batches_match_golden_checksums(name: str, digits: Data, train_loader: Build) -> None:
    expected, augment, size = GOLDEN[name]
    loader = train_loader(digits.train, augment=augment, img_size=size, micro_batch=8)
    parts = (part.numpy() for batch in loader for part in (batch.images, batch.target["label"], batch.positions))
    assert checksum(parts) == expected


@pytest.mark.parametrize(("crop", "size", "expected"), [(0.875, (8, 8), 0x4C0E45F6), (0.8, (6, 10), 0x8461C6C5)])
def test_evaluation_batches_match_golden_checksums(
    crop: float, size: tuple[int, int], expected: int, digits: Data, eval_loader: BuildEval
) -> None:
    loader = eval_loader(digits.val, augment=AugmentConfig(eval_crop=crop), img_size=size)
    parts = (part.numpy() for batch in loader for part in (batch.images, batch.target["label"], batch.real))
    assert checksum(parts) == expected


@pytest.mark.parametrize("workers", [2, 8])
def test_any_number_of_workers_gives_same_batches(
    workers: int, digits: Data, train_loader: Build, reference: dict
) -> None:
    loader = train_loader(digits.train, augment=EVERYTHING, workers=workers, micro_batch=4)
    assert joined(loader) == reference
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_early_start_gives_same_batches(workers: int, digits: Data, train_loader: Build, reference: dict) -> None:
    loader = train_loader(digits.train, augment=EVERYTHING, workers=workers)
    loader.start()
    loader.start()
    assert joined(loader) == reference
    loader.close()


@pytest.mark.parametrize(("world", "micro"), [(1, 2), (2, 8), (2, 1), (4, 4)])
def test_any_world_size_and_micro_batch_gives_same_global_batches(
    world: int, micro: int, digits: Data, train_loader: Build, reference: dict
) -> None:
    parts = [
        train_loader(digits.train, augment=EVERYTHING, world=world, rank=rank, micro_batch=micro)
        for rank in range(world)
    ]
    batches = [list(part) for part in parts]
    assert {len(part) for part in batches} == {64 // world // micro}
    found: dict[int, tuple[bytes, int]] = {}
    for part in batches:
        found |= joined(part)
    assert found == reference
    # Step by step, not only in total.
    first_step = {
        int(position) for part in batches for batch in part[: 16 // world // micro] for position in batch.positions
    }
    assert first_step == set(range(16))


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_run_continues_with_the_same_batches(
    workers: int, digits: Data, train_loader: Build, reference: dict
) -> None:
    resumed = train_loader(digits.train, augment=EVERYTHING, start_step=3, workers=workers)
    assert len(resumed) == 1
    assert joined(resumed) == {position: reference[position] for position in range(48, 64)}
    resumed.close()


def test_any_step_is_reached_without_replay(digits: Data, train_loader: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    source = digits.train
    read = type(source).read
    monkeypatch.setattr(type(source), "read", lambda self, index: reads.append(index) or read(self, index))
    step = 10**9
    batches = list(train_loader(source, start_step=step, end_step=step + 1))
    assert len(reads) == 16
    assert reads == sample_index(3, np.arange(16 * step, 16 * (step + 1)), len(source)).tolist()
    assert batches[0].positions[0] == 16 * step


def test_seed_changes_images_and_random_choices(digits: Data, train_loader: Build, reference: dict) -> None:
    other = joined(train_loader(digits.train, augment=EVERYTHING, seed=4))
    assert sum(other[p] == reference[p] for p in reference) < 3


def test_image_is_augmented_differently_in_each_epoch(digits: Data, train_loader: Build) -> None:
    few = digits.train.subset(np.arange(16))
    loader = train_loader(few, augment=AugmentConfig(crop="random", crop_padding=2), end_step=2)
    first, second = loader
    assert sorted(first.target["label"]) == sorted(second.target["label"])
    assert len(set(map(bytes, first.images.numpy())) & set(map(bytes, second.images.numpy()))) < 4


def test_repeated_augmentation_gives_different_copies(digits: Data, train_loader: Build) -> None:
    augment = AugmentConfig(crop="random_resized", repeats=3)
    batch = next(iter(train_loader(digits.train, augment=augment, global_batch=48, micro_batch=48)))
    index = sample_index(3, np.arange(48), len(digits.train), 3)
    assert len(np.unique(index)) == 16
    copies = batch.images[torch.from_numpy(index == index[0])]
    assert len(copies) == 3
    assert len({image.numpy().tobytes() for image in copies}) == 3


def test_batches_are_not_overwritten_by_later_ones(digits: Data, train_loader: Build) -> None:
    loader = train_loader(digits.train, workers=1, end_step=12)
    batches = list(loader)
    loader.close()
    again = list(train_loader(digits.train, end_step=12))
    assert all(torch.equal(a.images, b.images) for a, b in zip(batches, again, strict=True))


@pytest.mark.parametrize("workers", [1, 2])
def test_reserved_batches_are_not_copied_and_not_overwritten(workers: int, digits: Data, train_loader: Build) -> None:
    reserved = 2 * workers
    expected = [batch.images for batch in train_loader(digits.train, end_step=24)]
    loader = train_loader(digits.train, workers=workers, end_step=24, reserved_batches=reserved)
    window: deque[torch.Tensor] = deque(maxlen=reserved)
    places = set()
    for i, batch in enumerate(loader):
        window.append(batch.images)
        places.add(batch.images.data_ptr())
        time.sleep(0.02)  # The workers run ahead as far as they can.
        for images, correct in zip(window, expected[i + 1 - len(window) : i + 1], strict=True):
            assert torch.equal(images, correct)
    loader.close()
    assert len(places) == 4 * workers


# ------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch", [7, 64, 500])
def test_evaluation_counts_each_image_once(world: int, batch: int, digits: Data, eval_loader: BuildEval) -> None:
    ranks = [list(eval_loader(digits.val, world=world, rank=rank, batch=batch)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1, "no process waits for another"
    everything = [part for batches in ranks for part in batches]
    assert all(part.images.shape == (batch, 1, 8, 8) for part in everything)
    assert sorted(int(index) for part in everything for index in part.positions[part.real]) == list(range(180))
    counted = torch.cat([part.target["label"][part.real] for part in everything])
    assert torch.equal(counted.bincount(), torch.from_numpy(np.bincount(digits.val.labels)))


def test_evaluation_repeats_with_the_same_workers(digits: Data, eval_loader: BuildEval) -> None:
    loader = eval_loader(digits.val, workers=2)
    first = [batch.images for batch in loader]
    second = [batch.images for batch in loader]
    assert len(first) == len(loader)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b.images) for a, b in zip(first, eval_loader(digits.val), strict=True))
    loader.close()


# --------------------------------------------------------------------------------------------------------- failures


@pytest.fixture
def corrupt(image_folder: Path) -> Data:
    """30 images, of which `bee/3.png` and `bee/4.png` are corrupt."""
    for i in (3, 4):
        path = image_folder / "bee" / f"{i}.png"
        path.write_bytes(path.read_bytes()[:60])
    return open_data(DataConfig(source=str(image_folder), val_split="train"), seed=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_raise_names_the_file(workers: int, corrupt: Data, train_loader: Build) -> None:
    loader = train_loader(corrupt.train, in_chans=3, workers=workers)
    with pytest.raises(UserError, match=r"bee/[34].png \(row 1[34] of .*\): cannot be decoded: .*data.on_error=skip"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_takes_deterministic_substitute_and_counts(workers: int, corrupt: Data, train_loader: Build) -> None:
    augment = AugmentConfig(crop="none", hflip=0.0)
    options = {"in_chans": 3, "on_error": "skip", "augment": augment, "global_batch": 30, "micro_batch": 10}
    loader = train_loader(corrupt.train, workers=workers, **options)
    batches = list(loader)
    loader.close()
    order = sample_index(3, np.arange(120), 30)
    shown = torch.cat([batch.images[:, 0, 0, 0] for batch in batches]).numpy()
    substitutes = np.where((order == 13) | (order == 14), 15, order)
    assert np.array_equal(shown, 8 * substitutes + substitutes // 10)
    assert len(loader.problems) == 2, "an image counts once, however often it is read"
    assert sorted(problem.number for problem in loader.problems.first) == [13, 14]
    assert "2 images could not be read" in loader.problems.summary()
    assert "bee/3.png" in loader.problems.summary()


def test_evaluation_skips_unreadable_images(corrupt: Data, eval_loader: BuildEval) -> None:
    loader = eval_loader(corrupt.val, in_chans=3, batch=10, on_error="skip")
    assert sum(int(batch.real.sum()) for batch in loader) == 28
    assert len(loader.problems) == 2


def test_only_ten_names_are_reported(tmp_path: Path, train_loader: Build) -> None:
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(20):
            path = tmp_path / "images" / name / f"{i:02d}.png"
            Image.new("RGB", (8, 8)).save(path)
            if name == "a" and i >= 4:
                path.write_bytes(b"not an image")
    data = open_data(DataConfig(source=str(tmp_path / "images"), val_split="train"), seed=0)
    loader = train_loader(data.train, in_chans=3, on_error="skip", end_step=10)
    list(loader)
    assert len(loader.problems) == 16
    assert len(loader.problems.first) == 10
    assert loader.problems.summary().endswith("... and 6 more")


def test_only_unreadable_images_end_with_a_message(tmp_path: Path, train_loader: Build) -> None:
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(20):
            (tmp_path / "images" / name / f"{i}.png").write_bytes(b"not an image")
    data = open_data(DataConfig(source=str(tmp_path / "images")), seed=0)
    with pytest.raises(UserError, match="20 consecutive images are unreadable"):
        list(train_loader(data.train, in_chans=3, on_error="skip"))


class Deadly:
    """A source whose reader is killed at an image, as when out of memory."""

    name = "deadly"
    labels = np.zeros(64, np.int64)

    def __len__(self) -> int:
        return 64

    def describe(self, index: int) -> str:
        return f"image {index}"

    def read(self, index: int) -> Any:
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return Sample(np.zeros((8, 8), np.uint8), 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_dead_worker_ends_the_run_with_a_message(workers: int, train_loader: Build) -> None:
    loader = train_loader(Deadly(), workers=workers, end_step=8)
    with pytest.raises(UserError, match="A data-loading worker died"):
        list(loader)


def test_closing_ends_the_workers(digits: Data, train_loader: Build) -> None:
    import psutil

    before = set(psutil.Process().children())
    loader = train_loader(digits.train, workers=2, end_step=1000)
    batches = iter(loader)
    next(batches)
    started = set(psutil.Process().children()) - before
    assert len(started) == 2
    loader.close()
    assert next(batches, None) is None
    _, alive = psutil.wait_procs(list(started), timeout=20)
    assert not alive


def test_closing_ends_workers_before_the_first_batch(digits: Data, train_loader: Build) -> None:
    import psutil

    before = set(psutil.Process().children())
    loader = train_loader(digits.train, workers=2, end_step=1000)
    loader.start()
    started = set(psutil.Process().children()) - before
    assert len(started) == 2
    loader.close()
    assert list(loader) == []
    _, alive = psutil.wait_procs(list(started), timeout=20)
    assert not alive


def test_workers_collect_garbage_even_if_started_while_it_is_disabled(train_loader: Build) -> None:
    class Source(Deadly):
        def read(self, index: int) -> Any:
            return Sample(np.zeros((8, 8), np.uint8), int(gc.isenabled()))

    loader = train_loader(Source(), workers=1)
    gc.disable()
    try:
        loader.start()
    finally:
        gc.enable()
    assert all(batch.target["label"].all() for batch in loader)
    loader.close()


UNCLOSED = """
from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.augment.transforms import TrainTransform
from vit_scale.data.data import open_data
from vit_scale.data.loading.loaders import Loading, TrainLoader
from vit_scale.data.sampling import TrainIndices
from vit_scale.data.targets import ClassTarget

source = open_data(DataConfig(source="embedded:digits"), seed=0).train
transform = TrainTransform(AugmentConfig(), (8, 8), (0.5,), (0.25,))
indices = TrainIndices(global_batch=4, micro_batch=4, end_step=1000, seed=0, images=len(source))
batches = iter(TrainLoader(source, transform, indices, ClassTarget(), Loading(channels=1, workers=2)))
print(len(next(batches).images))
"""


def test_program_without_close_still_ends() -> None:
    done = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_number_of_workers_depends_on_cores_and_data(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    large = open_data(DataConfig(source="synthetic"), seed=0).train
    assert choose_workers(DataConfig(workers=5), 32, large) == 5
    assert choose_workers(DataConfig(workers=0), 32, large) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_workers(DataConfig(), 32, large) == 16
    assert choose_workers(DataConfig(), 8, large) == 8
    assert choose_workers(DataConfig(), 1, large) == 1
    assert choose_workers(DataConfig(), 8, digits.train) == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_workers(DataConfig(), 32, large) == 8
    assert choose_workers(DataConfig(), 32, digits.train) == 0
