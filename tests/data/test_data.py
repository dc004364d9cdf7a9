"""Opening data: what is found in every kind of source, and the messages if something is missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit_scale.config import DataConfig
from vit_scale.data.batch import DataInfo
from vit_scale.data.data import Data, check_labels, open_data
from vit_scale.data.images.decode import open_image
from vit_scale.data.targets import NoTarget
from vit_scale.errors import UserError


def level(source: Any, index: int) -> int:
    """Return the level of all pixels of an image of `image_folder`."""
    image = open_image(source.read(index).image, 3)
    return int(image.crop((0, 0, image.width, image.height), (1, 1))[0, 0, 0])


def contents(data: Data) -> set[tuple[int, int]]:
    """Levels and labels of all images of both splits."""
    return {(level(s, i), s.read(i).target) for s in (data.train, data.val) for i in range(len(s))}


EXPECTED = {(8 * (10 * label + i) + label, label) for label in range(3) for i in range(10)}


def as_dataset(image_folder: Path) -> Any:
    import datasets

    return datasets.load_dataset("imagefolder", data_dir=str(image_folder))["train"]


def test_embedded_digits(digits: Data) -> None:
    assert (len(digits.train), len(digits.val)) == (1617, 180)
    assert digits.num_classes == 10
    assert digits.class_names == tuple("0123456789")
    assert digits.in_chans == 1
    counts = (160, 164, 159, 165, 163, 164, 162, 161, 157, 162)
    assert digits.info == DataInfo(1617, 1, digits.class_names, counts)
    assert digits.description == "embedded:digits (1,617 training images, 180 validation images, 10 classes)"
    assert open_image(digits.train.read(0).image, 1).crop((0, 0, 8, 8), (8, 8)).max() > 200


def test_synthetic_images_are_free_and_learnable() -> None:
    config = DataConfig(
        source="synthetic", synthetic_images=10**7, synthetic_classes=7, synthetic_size=32, synthetic_chans=2
    )
    data = open_data(config, seed=0)
    assert len(data.train) == 10**7
    assert (data.num_classes, data.in_chans) == (7, 2)
    image, label = data.train.read(10**7 - 1)
    assert image.shape == (32, 32, 2)
    assert label == (10**7 - 1) % 7
    assert np.array_equal(data.train.read(3).image, data.train.read(3 + 4 * 7).image), "a few images per class"
    assert not np.array_equal(data.train.read(3).image, data.train.read(4).image)


def test_image_folder_by_class(image_folder: Path) -> None:
    data = open_data(DataConfig(source=str(image_folder), val_fraction=0.2), seed=0)
    assert data.class_names == ("ant", "bee", "cow")
    assert (len(data.train), len(data.val)) == (24, 6)
    assert contents(data) == EXPECTED
    assert data.in_chans == 3
    assert "ant/" in data.train.describe(0)


def test_image_folder_with_train_and_val(image_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(image_folder, tmp_path / "both" / "train")
    shutil.copytree(image_folder, tmp_path / "both" / "val")
    data = open_data(DataConfig(source=str(tmp_path / "both")), seed=0)
    assert (len(data.train), len(data.val)) == (30, 30)
    assert contents(data) == EXPECTED


def test_directory_of_parquet_files(image_folder: Path, tmp_path: Path) -> None:
    import datasets

    (tmp_path / "parquet").mkdir()
    table = as_dataset(image_folder)
    table = table.map(lambda row: {"image": {"bytes": Path(row["image"].filename).read_bytes(), "path": None}})
    table = table.cast_column("image", datasets.Image())
    table.select(range(0, 30, 2)).to_parquet(tmp_path / "parquet" / "train-00000-of-00002.parquet")
    table.select(range(1, 30, 2)).to_parquet(tmp_path / "parquet" / "train-00001-of-00002.parquet")
    data = open_data(DataConfig(source=str(tmp_path / "parquet")), seed=0)
    assert contents(data) == EXPECTED
    assert data.class_names == ("ant", "bee", "cow")
    assert isinstance(memoryview(data.train.read(0).image), memoryview), "bytes, not a copy"
    assert "row" in data.train.describe(0)


@pytest.mark.parametrize("with_splits", [False, True])
def test_save_to_disk_directory(with_splits: bool, image_folder: Path, tmp_path: Path) -> None:
    import datasets

    table = as_dataset(image_folder)
    saved = datasets.DatasetDict({"train": table, "test": table}) if with_splits else table
    saved.save_to_disk(tmp_path / "saved")
    data = open_data(DataConfig(source=str(tmp_path / "saved")), seed=0)
    assert contents(data) == EXPECTED
    assert len(data.val) == (30 if with_splits else 3)


def test_splits_by_name_and_slices(image_folder: Path, tmp_path: Path) -> None:
    import datasets

    table = as_dataset(image_folder)
    datasets.DatasetDict({"train": table, "validation": table, "extra": table}).save_to_disk(tmp_path / "saved")
    config = DataConfig(source=str(tmp_path / "saved"), train_split="train[20:]", val_split="extra[:10%]")
    data = open_data(config, seed=0)
    assert [level(data.train, i) for i in range(10)] == [8 * (20 + i) + 2 for i in range(10)]
    assert (len(data.val), level(data.val, 0)) == (3, 0)
    with pytest.raises(
        UserError, match="data.val_split=other: split not found in .* available: train, validation, extra"
    ):
        open_data(DataConfig(source=str(tmp_path / "saved"), val_split="other"), seed=0)
    with pytest.raises(UserError, match=r"data.train_split=train\[a:b\]: invalid split"):
        open_data(DataConfig(source=str(tmp_path / "saved"), train_split="train[a:b]"), seed=0)


def save(tmp_path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> str:
    import datasets

    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features) if features else None)
    made.save_to_disk(tmp_path / "made")
    return str(tmp_path / "made")


def png(encode: Callable[..., bytes], value: int) -> dict[str, Any]:
    return {"bytes": encode(np.full((4, 4), value, np.uint8), "png"), "path": None}


def test_columns_are_found_by_type_or_by_option(encode: Callable[..., bytes], tmp_path: Path) -> None:
    import datasets

    image = datasets.Image()
    columns = {"id": [0, 1, 2, 3], "photo": [png(encode, i) for i in range(4)], "mask": [png(encode, 9)] * 4}
    columns |= {"fine_label": [0, 1, 2, 0], "coarse_label": [0, 0, 1, 0]}
    features = {"id": datasets.Value("int64"), "photo": image, "mask": image}
    features |= {name: datasets.ClassLabel(num_classes=3) for name in ("fine_label", "coarse_label")}
    source = save(tmp_path, columns, features)
    with pytest.raises(UserError, match="data.image_column: .* several candidates: photo, mask"):
        open_data(DataConfig(source=source), seed=0)
    data = open_data(DataConfig(source=source, image_column="photo"), seed=0)
    assert data.in_chans == 1
    assert sorted([*data.train.labels, *data.val.labels]) == [0, 0, 1, 2], "the finer label"
    data = open_data(DataConfig(source=source, image_column="mask", label_column="coarse_label"), seed=0)
    assert sorted([*data.train.labels, *data.val.labels]) == [0, 0, 0, 1]
    with pytest.raises(UserError, match="data.label_column=nope: column not found; available: id, photo"):
        open_data(DataConfig(source=source, image_column="mask", label_column="nope"), seed=0)


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["dog", "cat", "dog", "eel"], ("cat", "dog", "eel"), [1, 0, 1, 2]),
        ([2, 0, 1, 2], ("0", "1", "2"), [2, 0, 1, 2]),
    ],
)
def test_text_and_integer_labels(
    labels: list, names: tuple, numbers: list, encode: Callable[..., bytes], tmp_path: Path
) -> None:
    import datasets

    kind = datasets.Value("string" if isinstance(labels[0], str) else "int32")
    source = save(
        tmp_path,
        {"image": [png(encode, i) for i in range(4)], "label": labels},
        {"image": datasets.Image(), "label": kind},
    )
    data = open_data(DataConfig(source=source, val_split="train"), seed=0)
    assert data.class_names == names
    assert data.train.labels.tolist() == numbers


def test_array_columns_with_many_channels(tmp_path: Path) -> None:
    import datasets

    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 12, 10), dtype=np.uint8)
    features = {"bands": datasets.Array3D((5, 12, 10), "uint8"), "label": datasets.ClassLabel(num_classes=2)}
    source = save(tmp_path, {"bands": list(pixels), "label": [0, 1] * 3}, features)
    data = open_data(DataConfig(source=source, val_split="train"), seed=0)
    assert data.in_chans == 5
    image = open_image(data.train.read(4).image, 5)
    assert np.array_equal(image.crop((0, 0, 10, 12), (1, 1)), pixels[4].transpose(1, 2, 0))


def test_missing_directory_names_the_nearest(image_folder: Path) -> None:
    with pytest.raises(UserError, match=f"directory not found; nearest: {image_folder}"):
        open_data(DataConfig(source=str(image_folder) + "x"), seed=0)
    with pytest.raises(UserError, match="is a file; expected a directory"):
        open_data(DataConfig(source=str(image_folder / "ant" / "0.png")), seed=0)


@pytest.mark.parametrize("what", ["nothing", "text"])
def test_directory_without_images(what: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    if what == "text":
        (tmp_path / "folder" / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match="no images, parquet files or saved dataset"):
        open_data(DataConfig(source=str(tmp_path / "folder")), seed=0)


def test_flat_folder_without_labels_is_rejected_for_classes(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "folder" / "a.png")
    with pytest.raises(
        UserError, match="1 image, but no class directories; .* one directory per class, .* data.labels"
    ):
        open_data(DataConfig(source=str(tmp_path / "folder")), seed=0)


def test_table_without_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no image column among text, label"):
        open_data(DataConfig(source=save(tmp_path, {"text": ["a"], "label": [0]})), seed=0)


def test_corrupt_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.parquet").write_bytes(b"PAR1 this is not parquet")
    with pytest.raises(UserError, match="data.source=.*cannot be read"):
        open_data(DataConfig(source=str(tmp_path / "folder")), seed=0)


def test_label_outside_the_classes(encode: Callable[..., bytes], tmp_path: Path) -> None:
    import datasets

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)}
    source = save(tmp_path, {"image": [png(encode, i) for i in range(3)], "label": [0, -1, 2]}, features)
    with pytest.raises(UserError, match="row 1 of .* has label -1, outside 0..2 .*seems to have no labels"):
        open_data(DataConfig(source=source, val_split="train"), seed=0)


def test_fewer_classes_than_labels(digits: Data) -> None:
    check_labels(digits.train, 10)
    with pytest.raises(UserError, match="has label 9, outside 0..8"):
        check_labels(digits.train, 9)


def test_unknown_embedded_source() -> None:
    with pytest.raises(UserError, match="unknown embedded dataset; available: embedded:digits"):
        open_data(DataConfig(source="embedded:letters"), seed=0)


def test_unreachable_hub_is_reported_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    from vit_scale.data.sources import splits as splits_module

    queries = []
    monkeypatch.setattr(splits_module, "is_hub_reachable", lambda: queries.append(1) or False)
    with pytest.raises(UserError, match="directory not found, and the Hub is unreachable"):
        open_data(DataConfig(source="someone/something"), seed=0)
    assert queries == [1], "no retries"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Dataset 'a/b' is a gated dataset on the Hub.", "gated on the Hub; accept its terms there"),
        ("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed.", "neither a directory nor a Hub dataset"),
    ],
)
def test_gated_and_missing_datasets_are_distinguished(
    message: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    from vit_scale.data.sources import splits as splits_module

    def reject(*args: Any, **options: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError(message)

    monkeypatch.setattr(splits_module, "is_hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", reject)
    with pytest.raises(UserError, match=expected):
        open_data(DataConfig(source="a/b"), seed=0)


def test_trust_remote_code_is_never_used(root: Path) -> None:
    files = list((root / "vit_scale" / "data").rglob("*.py"))
    assert files
    assert not any("trust_remote_code" in path.read_text() for path in files)


# ------------------------------------------------------------------------------------------------- without labels


@pytest.fixture
def flat_folder(tmp_path: Path) -> Path:
    """40 images without classes: every pixel of image `i` has the level `i`."""
    (tmp_path / "flat").mkdir()
    for i in range(40):
        Image.new("RGB", (6, 6), (i, i, i)).save(tmp_path / "flat" / f"{i:02d}.png")
    return tmp_path / "flat"


def test_flat_folder_is_accepted_without_labels(flat_folder: Path) -> None:
    data = open_data(DataConfig(source=str(flat_folder), val_fraction=0.25), NoTarget(), seed=0)
    assert (len(data.train), len(data.val)) == (30, 10)
    assert data.info == DataInfo(30, 3)
    assert data.train.labels is None
    assert data.description == f"{flat_folder} (30 training images, 10 validation images)"
    levels = [[level(source, i) for i in range(len(source))] for source in (data.train, data.val)]
    assert sorted(levels[0] + levels[1]) == list(range(40))


def test_hold_out_without_labels_is_random_and_the_same_for_all_seeds(flat_folder: Path) -> None:
    held_out = []
    for seed in (0, 1):
        val = open_data(DataConfig(source=str(flat_folder), val_fraction=0.25), NoTarget(), seed=seed).val
        held_out.append([level(val, i) for i in range(len(val))])
    assert held_out[0] == held_out[1]
    gaps = np.diff(sorted(held_out[0]))
    assert len(set(gaps)) > 2, "not every fourth image"


def test_table_without_label_column_and_labels_that_are_not_needed(
    encode: Callable[..., bytes], image_folder: Path, tmp_path: Path
) -> None:
    import datasets

    source = save(tmp_path, {"image": [png(encode, i) for i in range(4)]}, {"image": datasets.Image()})
    data = open_data(DataConfig(source=source), NoTarget(), seed=0)
    assert (len(data.train), len(data.val), data.num_classes) == (3, 1, 0)
    labeled = open_data(DataConfig(source=str(image_folder)), NoTarget(), seed=0)
    assert labeled.train.read(0).target is None
    assert labeled.class_names == ()


def test_synthetic_images_without_labels() -> None:
    data = open_data(DataConfig(source="synthetic"), NoTarget(), seed=0)
    assert data.info == DataInfo(1024, 3)


def test_empty_directory_is_rejected_without_labels_too(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no images, parquet files or saved dataset"):
        open_data(DataConfig(source=str(tmp_path / "empty")), NoTarget(), seed=0)


def test_single_image_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "one" / "a.png")
    with pytest.raises(UserError, match="at least 2 are needed to hold one out"):
        open_data(DataConfig(source=str(tmp_path / "one")), NoTarget(), seed=0)
