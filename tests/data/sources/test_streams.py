"""Streams: shards are split by process, no process runs out of images, evaluation is exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.data import Data, open_data
from vit_scale.data.loading.loaders import EvalLoader, TrainLoader
from vit_scale.data.loading.workers import choose_workers
from vit_scale.data.sources.cache import with_cache
from vit_scale.data.targets import Columns, NoTarget
from vit_scale.errors import UserError

Build = Callable[..., TrainLoader]
PLAIN = AugmentConfig(crop="none", hflip=0.0)


@pytest.fixture
def shards(tmp_path: Path, encode: Callable[..., bytes]) -> Callable[..., DataConfig]:
    """A directory of uneven shards; every pixel of image `i` has the level `i`."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})

    def build(corrupt: bool = False, label: int | None = None, **splits: tuple[int, ...]) -> DataConfig:
        number = 0
        for split, sizes in (splits or {"train": (30, 7, 50), "validation": (11, 12)}).items():
            for shard, size in enumerate(sizes):
                images = [encode(np.full((8, 8), number + i, np.uint8), "png") for i in range(size)]
                if corrupt:
                    images[0] = b"not an image"
                rows = {
                    "image": [{"bytes": image, "path": None} for image in images],
                    "label": [i % 3 if label is None else label for i in range(size)],
                }
                name = f"{split}-{shard:05d}-of-{len(sizes):05d}.parquet"
                datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / name)
                number += size
        return DataConfig(source=str(tmp_path), streaming=True)

    return build


@pytest.fixture
def stream(shards: Callable[..., DataConfig]) -> Data:
    return open_data(shards(), seed=0)


def levels(batches: list) -> list[int]:
    return [int(level) for batch in batches for level in batch.images[:, 0, 0, 0]]


def test_stream_is_opened_without_reading_it(stream: Data) -> None:
    assert stream.num_classes == 3
    assert stream.class_names == ("a", "b", "c")
    assert stream.in_chans == 1
    assert stream.description.endswith("(streaming, an unknown number of training images, 3 classes)")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_uneven_shards_give_every_process_the_same_number_of_batches(
    world: int, workers: int, stream: Data, train_loader: Build
) -> None:
    seen: list[int] = []
    for rank in range(world):
        options = {"world": world, "rank": rank, "workers": workers, "global_batch": 12, "micro_batch": 2}
        loader = train_loader(stream.train, augment=PLAIN, end_step=20, **options)
        batches = list(loader)
        loader.close()
        assert len(batches) == len(loader) == 20 * 12 // world // 2
        assert [int(batch.positions[0]) % 12 for batch in batches[: 6 // world]] == list(
            range(rank * 12 // world, (rank + 1) * 12 // world, 2)
        )
        seen += levels(batches)
    assert set(seen) == set(range(87)), "a few epochs visit all images"


def test_processes_read_different_images(stream: Data, train_loader: Build) -> None:
    options = {"augment": PLAIN, "world": 3, "global_batch": 12, "micro_batch": 4, "end_step": 1}
    parts = [set(levels(list(train_loader(stream.train, rank=rank, **options)))) for rank in range(3)]
    assert not parts[0] & parts[1]
    assert not parts[1] & parts[2]


def test_stream_is_shuffled_and_resumed_with_different_images(stream: Data, train_loader: Build) -> None:
    options = {"augment": PLAIN, "global_batch": 16, "micro_batch": 16}
    first = levels(list(train_loader(stream.train, end_step=5, **options)))
    assert first == levels(list(train_loader(stream.train, end_step=5, **options))), "the same seed, the same order"
    assert first != sorted(first)
    resumed = levels(list(train_loader(stream.train, start_step=4, end_step=5, **options)))
    assert resumed != first[:16]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_stream_evaluation_counts_each_image_once(
    world: int, workers: int, stream: Data, eval_loader: Callable[..., EvalLoader]
) -> None:
    found: list[int] = []
    lengths = set()
    for rank in range(world):
        loader = eval_loader(stream.val, augment=PLAIN, batch=5, rank=rank, world=world, workers=workers)
        batches = list(loader)
        loader.close()
        lengths.add(len(batches))
        found += [int(level) for batch in batches for level in batch.images[batch.real][:, 0, 0, 0]]
    assert len(lengths) == 1
    assert sorted(found) == list(range(87, 110))


def test_unreadable_images_of_a_stream(shards: Callable[..., DataConfig], train_loader: Build) -> None:
    stream = open_data(shards(corrupt=True), seed=0)
    with pytest.raises(UserError, match="image .* as read from .*: cannot be decoded"):
        list(train_loader(stream.train, end_step=10))
    loader = train_loader(stream.train, end_step=10, on_error="skip")
    assert len(list(loader)) == 10
    assert len(loader.problems) >= 3


def test_label_outside_the_classes_is_found_when_it_is_read(
    shards: Callable[..., DataConfig], train_loader: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_data(shards(), seed=0)
    object.__setattr__(stream.train, "columns", Columns(("label",), ("a", "b")))
    with pytest.raises(UserError, match="has label 2, outside 0..1"):
        list(train_loader(stream.train))


@pytest.mark.parametrize(
    ("splits", "changes", "message"),
    [
        ({"train": (5,)}, {}, "has no validation split, and a stream cannot be split"),
        ({"train": (5,), "test": (5,)}, {"train_split": "train[:3]"}, "streams cannot be sliced"),
    ],
)
def test_unsupported_stream_options_are_rejected(
    splits: dict[str, Any], changes: dict[str, Any], message: str, shards: Callable[..., DataConfig]
) -> None:
    source = shards(**splits).source
    with pytest.raises(UserError, match=message):
        open_data(DataConfig(source=source, streaming=True, **changes), seed=0)


def test_stream_of_unknown_length(stream: Data) -> None:
    with pytest.raises(UserError, match="the number of images of .* is unknown; use schedule.steps"):
        len(stream.train)
    assert stream.info.images == 0
    assert choose_workers(DataConfig(), 1, stream.train) >= 1


def test_stream_is_not_cached(stream: Data, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a stream cannot be cached"):
        with_cache(stream.train, DataConfig(cache="decoded", cache_dir=str(tmp_path)), img_size=(8, 8), in_chans=1)


def test_stream_without_labels(shards: Callable[..., DataConfig], train_loader: Build) -> None:
    stream = open_data(shards(), NoTarget(), seed=0)
    assert stream.class_names == ()
    assert stream.description.endswith("(streaming, an unknown number of training images)")
    batches = list(train_loader(stream.train, augment=PLAIN, target=NoTarget()))
    assert all(batch.target == {} for batch in batches)
    assert len(set(levels(batches))) > 32
