"""What can be opened, what is found in it, and what is said where something cannot be had."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit_scale.config import DataConfig
from vit_scale.data.images.decode import open_picture
from vit_scale.data.sources.table_source import Data, Source, balanced_holdout, check_labels, open_data
from vit_scale.errors import UserError


def level(source: Any, index: int) -> int:
    """The level of all pixels of an image of `image_folder`."""
    picture = open_picture(source.read(index).image, 3)
    return int(picture.crop((0, 0, picture.width, picture.height), (1, 1))[0, 0, 0])


def contents(data: Data) -> set[tuple[int, int]]:
    """Levels and labels of all images of both splits."""
    return {(level(s, i), s.read(i).label) for s in (data.train, data.val) for i in range(len(s))}


EXPECTED = {(8 * (10 * label + i) + label, label) for label in range(3) for i in range(10)}


def as_dataset(image_folder: Path) -> Any:
    import datasets

    return datasets.load_dataset("imagefolder", data_dir=str(image_folder))["train"]


def test_embedded_digits(digits: Data) -> None:
    assert (len(digits.train), len(digits.val)) == (1617, 180)
    assert digits.num_classes == 10
    assert digits.class_names == tuple("0123456789")
    assert digits.in_chans == 1
    assert digits.description == "embedded:digits: 1,617 training and 180 validation images, 10 classes"
    assert open_picture(digits.train.read(0).image, 1).crop((0, 0, 8, 8), (8, 8)).max() > 200


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
    assert np.array_equal(data.train.read(3).image, data.train.read(3 + 4 * 7).image), "a few pictures for each class"
    assert not np.array_equal(data.train.read(3).image, data.train.read(4).image)


def test_a_folder_of_images_by_class(image_folder: Path) -> None:
    data = open_data(DataConfig(source=str(image_folder), val_fraction=0.2), seed=0)
    assert data.class_names == ("ant", "bee", "cow")
    assert (len(data.train), len(data.val)) == (24, 6)
    assert contents(data) == EXPECTED
    assert data.in_chans == 3
    assert "ant/" in data.train.describe(0)


def test_a_folder_with_train_and_val(image_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(image_folder, tmp_path / "both" / "train")
    shutil.copytree(image_folder, tmp_path / "both" / "val")
    data = open_data(DataConfig(source=str(tmp_path / "both")), seed=0)
    assert (len(data.train), len(data.val)) == (30, 30)
    assert contents(data) == EXPECTED


def test_a_folder_of_parquet_files(image_folder: Path, tmp_path: Path) -> None:
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
def test_a_save_to_disk_folder(with_splits: bool, image_folder: Path, tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match="data.val_split=dev: .* there are train, validation, extra"):
        open_data(DataConfig(source=str(tmp_path / "saved"), val_split="dev"), seed=0)
    with pytest.raises(UserError, match=r"data.train_split=train\[a:b\]: not a slice"):
        open_data(DataConfig(source=str(tmp_path / "saved"), train_split="train[a:b]"), seed=0)


def save(tmp_path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> str:
    import datasets

    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features) if features else None)
    made.save_to_disk(tmp_path / "made")
    return str(tmp_path / "made")


def png(encode: Callable[..., bytes], value: int) -> dict[str, Any]:
    return {"bytes": encode(np.full((4, 4), value, np.uint8), "png"), "path": None}


def test_columns_are_found_by_type_or_named(encode: Callable[..., bytes], tmp_path: Path) -> None:
    import datasets

    image = datasets.Image()
    columns = {"id": [0, 1, 2, 3], "picture": [png(encode, i) for i in range(4)], "mask": [png(encode, 9)] * 4}
    columns |= {"fine_label": [0, 1, 2, 0], "coarse_label": [0, 0, 1, 0]}
    features = {"id": datasets.Value("int64"), "picture": image, "mask": image}
    features |= {name: datasets.ClassLabel(num_classes=3) for name in ("fine_label", "coarse_label")}
    source = save(tmp_path, columns, features)
    with pytest.raises(UserError, match="data.image_column: .* several candidates, picture, mask"):
        open_data(DataConfig(source=source), seed=0)
    data = open_data(DataConfig(source=source, image_column="picture"), seed=0)
    assert data.in_chans == 1
    assert sorted([*data.train.labels, *data.val.labels]) == [0, 0, 1, 2], "the finer label"
    data = open_data(DataConfig(source=source, image_column="mask", label_column="coarse_label"), seed=0)
    assert sorted([*data.train.labels, *data.val.labels]) == [0, 0, 0, 1]
    with pytest.raises(UserError, match="data.label_column=nope: no such column; there are id, picture"):
        open_data(DataConfig(source=source, image_column="mask", label_column="nope"), seed=0)


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["dog", "cat", "dog", "eel"], ("cat", "dog", "eel"), [1, 0, 1, 2]),
        ([2, 0, 1, 2], ("0", "1", "2"), [2, 0, 1, 2]),
    ],
)
def test_labels_as_text_or_bare_numbers(
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


def test_columns_of_arrays_with_many_channels(tmp_path: Path) -> None:
    import datasets

    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 12, 10), dtype=np.uint8)
    features = {"bands": datasets.Array3D((5, 12, 10), "uint8"), "label": datasets.ClassLabel(num_classes=2)}
    source = save(tmp_path, {"bands": list(pixels), "label": [0, 1] * 3}, features)
    data = open_data(DataConfig(source=source, val_split="train"), seed=0)
    assert data.in_chans == 5
    picture = open_picture(data.train.read(4).image, 5)
    assert np.array_equal(picture.crop((0, 0, 10, 12), (1, 1)), pixels[4].transpose(1, 2, 0))


def test_the_hold_out_is_balanced_and_always_the_same() -> None:
    labels = np.random.default_rng(0).choice(20, 2000, p=np.arange(1, 21) / 210)
    held = balanced_holdout(labels, 0.1)
    assert held.sum() == 200
    share = np.bincount(labels[held], minlength=20) - 0.1 * np.bincount(labels, minlength=20)
    assert np.abs(share).max() <= 1
    assert np.array_equal(held, balanced_holdout(labels, 0.1))
    assert balanced_holdout(np.arange(500), 0.1).sum() == 50, "one image a class: a tenth of the classes"
    assert balanced_holdout(np.zeros(2, int), 0.9).sum() == 1, "something is left to train on"


def test_a_source_is_cheap_to_send_to_workers(image_folder: Path) -> None:
    data = open_data(DataConfig(source=str(image_folder)), seed=0)
    data.train.read(0)
    copy = pickle.loads(pickle.dumps(data.train))
    assert isinstance(copy, Source)
    assert copy.read(5) == data.train.read(5)


def test_no_such_folder_names_the_nearest(image_folder: Path) -> None:
    with pytest.raises(UserError, match=f"there is no such folder; nearest: {image_folder}"):
        open_data(DataConfig(source=str(image_folder) + "x"), seed=0)
    with pytest.raises(UserError, match="is a file, a folder is needed"):
        open_data(DataConfig(source=str(image_folder / "ant" / "0.png")), seed=0)


@pytest.mark.parametrize("what", ["nothing", "text"])
def test_a_folder_without_images(what: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    if what == "text":
        (tmp_path / "folder" / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match="no images, no parquet files and no saved dataset"):
        open_data(DataConfig(source=str(tmp_path / "folder")), seed=0)


def test_images_without_labels(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "folder" / "a.png")
    with pytest.raises(UserError, match="no column of labels among image.*one folder for each class"):
        open_data(DataConfig(source=str(tmp_path / "folder")), seed=0)


def test_a_table_without_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no column of images among text, label"):
        open_data(DataConfig(source=save(tmp_path, {"text": ["a"], "label": [0]})), seed=0)


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.parquet").write_bytes(b"PAR1 this is not parquet")
    with pytest.raises(UserError, match="data.source=.*cannot be read"):
        open_data(DataConfig(source=str(tmp_path / "folder")), seed=0)


def test_a_label_outside_the_classes(encode: Callable[..., bytes], tmp_path: Path) -> None:
    import datasets

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)}
    source = save(tmp_path, {"image": [png(encode, i) for i in range(3)], "label": [0, -1, 2]}, features)
    with pytest.raises(UserError, match="row 1 of .* has label -1, outside 0..2 .*seems to have no labels"):
        open_data(DataConfig(source=source, val_split="train"), seed=0)


def test_fewer_classes_than_labels(digits: Data) -> None:
    check_labels(digits.train, 10)
    with pytest.raises(UserError, match="has label 9, outside 0..8"):
        check_labels(digits.train, 9)


def test_an_unknown_embedded_source() -> None:
    with pytest.raises(UserError, match="the embedded images are `embedded:digits`"):
        open_data(DataConfig(source="embedded:letters"), seed=0)


def test_the_hub_out_of_reach_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vit_scale.data.sources import splits as opening

    asked = []
    monkeypatch.setattr(opening, "is_hub_reachable", lambda: asked.append(1) or False)
    with pytest.raises(UserError, match="no such folder here, and the hub cannot be reached"):
        open_data(DataConfig(source="someone/something"), seed=0)
    assert asked == [1], "asked once, without retries"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Dataset 'a/b' is a gated dataset on the Hub.", "gated on the hub; accept its terms there"),
        ("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed.", "no such dataset on the hub"),
    ],
)
def test_gated_and_missing_datasets_are_told_apart(
    message: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    from vit_scale.data.sources import splits as opening

    def refuse(*args: Any, **options: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError(message)

    monkeypatch.setattr(opening, "is_hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=expected):
        open_data(DataConfig(source="a/b"), seed=0)


def test_no_code_of_strangers_is_run() -> None:
    folder = Path(__file__).parents[2] / "vit_scale" / "data"
    assert not any("trust_remote_code" in path.read_text() for path in folder.glob("*.py"))
