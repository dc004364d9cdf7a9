"""The decoded copy: written once, complete or absent, rewritten when the source changes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit_scale.config import AugmentConfig, DataConfig
from vit_scale.data.data import Data, open_data
from vit_scale.data.loading.loaders import TrainLoader
from vit_scale.data.sources import cache
from vit_scale.data.sources.cache import CachedSource, with_cache
from vit_scale.data.spatial_targets import BoxTarget
from vit_scale.errors import UserError


@pytest.fixture
def config(image_folder: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(source=str(image_folder), cache="decoded", cache_dir=str(tmp_path / "cache"), cache_size=8)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each time a copy is written."""
    notes: list[str] = []
    original = cache._write

    def note(*args: Any) -> None:
        notes.append("written")
        original(*args)

    monkeypatch.setattr(cache, "_write", note)
    return notes


def cached(config: DataConfig, in_chans: int = 3) -> Any:
    data = open_data(config, seed=0)
    return with_cache(data.train, config, img_size=(8, 8), in_chans=in_chans)


def test_copy_has_the_same_images_at_the_chosen_size(config: DataConfig) -> None:
    source, copy = open_data(config, seed=0).train, cached(config)
    assert isinstance(copy, CachedSource)
    assert len(copy) == len(source) == 27
    assert np.array_equal(copy.labels, source.labels)
    assert copy.describe(3) == source.describe(3)
    for i in range(27):
        pixels, label = copy.read(i)
        assert pixels.shape == (8, 8, 3)
        number = int(source.rows[i])
        assert np.all(pixels == 8 * number + number // 10)
        assert label == number // 10


def test_source_itself_is_used_by_default(folder_data: Data) -> None:
    assert with_cache(folder_data.train, DataConfig(), img_size=(8, 8), in_chans=3) is folder_data.train


def test_images_keep_their_aspect_ratio_and_are_never_enlarged(
    photographs: list[np.ndarray], encode: Callable[..., bytes]
) -> None:
    assert cache.decode_small(encode(photographs[0][:100, :200], "png"), 50, 3).shape == (50, 100, 3)
    assert cache.decode_small(encode(photographs[0][:40, :30], "png"), 50, 3).shape == (40, 30, 3)
    small = cache.decode_small(encode(photographs[0], "png"), 112, 3)
    reference = np.asarray(Image.fromarray(photographs[0]).resize((112, 112), Image.Resampling.BICUBIC))
    assert np.abs(small.astype(int) - reference).max() <= 1


def test_default_size_leaves_a_margin_to_crop(config: DataConfig, tmp_path: Path) -> None:
    options = DataConfig(source=config.source, cache="decoded", cache_dir=config.cache_dir)
    source = open_data(options, seed=0).train
    assert with_cache(source, options, img_size=(10, 12), in_chans=3).read(0).image.shape == (12, 12, 3)


def test_copy_is_written_once_and_reused(config: DataConfig, written: list[str]) -> None:
    cached(config)
    cached(config)
    assert written == ["written"]


@pytest.mark.parametrize("change", ["file", "new file", "size", "channels"])
def test_change_of_source_or_options_rewrites_the_copy(
    change: str, config: DataConfig, image_folder: Path, written: list[str]
) -> None:
    first = cached(config)
    if change == "file":
        Image.new("RGB", (16, 16), "white").save(first.describe(0).split(" (")[0])
    elif change == "new file":
        Image.new("RGB", (16, 16), "white").save(image_folder / "ant" / "99.png")
    elif change == "size":
        config = DataConfig(source=config.source, cache="decoded", cache_dir=config.cache_dir, cache_size=9)
    copy = cached(config, in_chans=1 if change == "channels" else 3)
    assert len(written) == 2
    if change == "file":
        assert np.all(copy.read(0).image == 255)


def test_interrupted_write_starts_from_scratch(
    config: DataConfig, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = np.save
    monkeypatch.setattr(np, "save", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cached(config)
    monkeypatch.setattr(np, "save", save)
    directories = [path for path in Path(config.cache_dir).iterdir() if path.is_dir()]
    assert [directory.suffix for directory in directories] == [".partial"], "nothing that looks complete is left"
    assert len(cached(config)) == 27
    assert len(written) == 2
    assert not list(Path(config.cache_dir).glob("*.partial"))


def test_corrupt_copy_is_rewritten(config: DataConfig, written: list[str]) -> None:
    directory = cached(config).directory
    with open(directory / "pixels.bin", "ab") as file:
        file.truncate(100)
    cached(config)
    (directory / "cache.json").write_text("{")
    cached(config)
    assert len(written) == 3
    assert json.loads((directory / "cache.json").read_text())["bytes"] == 27 * 8 * 8 * 3


def test_workers_share_the_memory_map(config: DataConfig) -> None:
    copy = cached(config)
    pixels = copy.read(5).image
    assert len(pickle.dumps(copy)) < 100_000
    again = pickle.loads(pickle.dumps(copy))
    assert np.array_equal(again.read(5).image, pixels)
    base = pixels
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert "memmap" in type(base).__name__ or "mmap" in type(base).__name__


def test_training_from_the_copy(config: DataConfig, train_loader: Callable[..., TrainLoader]) -> None:
    copy = cached(config)
    augment = AugmentConfig(crop="none", hflip=0.0)
    direct = train_loader(open_data(config, seed=0).train, in_chans=3, augment=augment)
    for a, b in zip(direct, train_loader(copy, in_chans=3, augment=augment, workers=2), strict=True):
        assert np.array_equal(a.images, b.images)
        assert np.array_equal(a.target["label"], b.target["label"])


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_unreadable_images(
    on_error: str, config: DataConfig, image_folder: Path, train_loader: Callable[..., TrainLoader]
) -> None:
    (image_folder / "bee" / "3.png").write_bytes(b"not an image")
    options = DataConfig(
        source=config.source, cache="decoded", cache_dir=config.cache_dir, on_error=on_error, val_split="train"
    )
    if on_error == "raise":
        with pytest.raises(UserError, match="bee/3.png .*cannot be decoded"):
            cached(options)
        assert not [path for path in Path(config.cache_dir).iterdir() if path.is_dir()]
        return
    loader = train_loader(cached(options), in_chans=3, on_error="skip", end_step=10)
    list(loader)
    assert [problem.number for problem in loader.problems.first] == [13]
    assert "bee/3.png" in loader.problems.summary()


def test_lack_of_disk_space_is_reported_before_writing(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    free = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(UserError, match="needs about .* GB, but only .* choose another data.cache_dir"):
        cached(config)


def test_unwritable_directory_is_reported(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = DataConfig(source=config.source, cache="decoded", cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="data.cache_dir=.*choose a writable directory"):
        cached(options)


def test_boxes_are_not_cached(config: DataConfig, folder_data: Data) -> None:
    with pytest.raises(UserError, match="data.cache=decoded: .* boxes; set data.cache=none"):
        with_cache(folder_data.train, config, img_size=(8, 8), in_chans=3, target=BoxTarget())
