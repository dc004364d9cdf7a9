"""A directory of images by class: every file is read, rejected by name, or counted."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from vit_scale.config import DataConfig
from vit_scale.data.data import Data, open_data
from vit_scale.data.images import file_types
from vit_scale.data.images.decode import count_channels
from vit_scale.data.sources.splits import open_splits
from vit_scale.data.targets import NoTarget, Target
from vit_scale.errors import UserError

Open = Callable[..., Data]
CLASSES = tuple(f"{name}/{i}.jpg" for name in ("cat", "dog", "eel") for i in range(20))
ODD_NAMES = ("a\nb.jpg", "x::zip.jpg", "ü 猫.jpg", "# [1] 100%.jpg", "*?.jpg", "'\".jpg", " .jpg", "a.b.c.JPG", "-.PnG")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Create empty files below `photos`, which is enough to list them, and open the directory."""
    monkeypatch.chdir(tmp_path)

    def build(*paths: str, target: Target | None = None, **options: Any) -> Data:
        for path in paths:
            file = tmp_path / "photos" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.mkdir(exist_ok=True) if path.endswith("/") else file.touch()
        return open_data(DataConfig(source="photos", **options), target, seed=0)

    return build


def inside(directory: str, *paths: str) -> list[str]:
    return [f"{directory}/{path}" for path in paths or CLASSES]


def read(data: Data) -> list[str]:
    """Paths of all images of both splits, relative to the directory."""
    found = [source.read(i).image for source in (data.train, data.val) for i in range(len(source))]
    return sorted(path.partition("/photos/")[2] for path in found)


def classes_by_path(data: Data) -> dict[str, str]:
    sources = (data.train, data.val)
    samples = [source.read(i) for source in sources for i in range(len(source))]
    return {sample.image.partition("/photos/")[2]: data.class_names[sample.target] for sample in samples}


# ------------------------------------------------------------------------------------------------- splits


def test_file_names_are_never_splits(photos: Open) -> None:
    names = [*CLASSES, "cat/test_01.jpg", "dog/train.jpg", "eel/val-2.jpg", "eel/validation.png"]
    data = photos(*names)
    assert read(data) == sorted(names)
    assert data.notes == ()
    assert data.details["split"] == "10% of each class of train held out for validation"


@pytest.mark.parametrize("val", ["val", "VAL", "Valid", "Validation"])
def test_split_directories_in_any_case(val: str, photos: Open) -> None:
    data = photos(*inside("Train"), *inside(val, "cat/a.jpg", "dog/b.jpg", "eel/c.jpg"))
    assert (len(data.train), len(data.val)) == (60, 3)
    assert data.details["split"] == f"train (training), {val} (validation)"


def test_splits_that_are_not_used_are_named(photos: Open) -> None:
    data = photos(*inside("train"), *inside("Valid"), *inside("TEST", "cat/1.jpg"))
    assert data.details["split"] == "train (training), Valid (validation); not used: TEST (1 image)"


@pytest.mark.parametrize(
    ("train", "val", "overlaps"),
    [
        ("train", "train[:10%]", True),
        ("Train[10%:]+train[:5]", "train[:10%]", True),
        ("train[10%:]", "train[:10%]", False),
        ("train", "test", False),
    ],
)
def test_validation_images_that_are_trained_on_are_named(train: str, val: str, overlaps: bool, photos: Open) -> None:
    data = photos(*inside("train"), *inside("test"), train_split=train, val_split=val)
    note = f"photos: data.val_split={val} overlaps data.train_split={train}"
    assert any(text.startswith(note) for text in data.notes) == overlaps


@pytest.mark.parametrize("val_split", ["val", "valid", "validation", "dev", "Val", "val[:2]"])
def test_val_split_under_any_of_its_names(val_split: str, photos: Open) -> None:
    data = photos(*inside("train"), *inside("Valid"), *inside("test", "cat/1.jpg"), val_split=val_split)
    assert len(data.val) == (2 if "[" in val_split else 60)


def test_two_directories_of_the_same_split_are_an_error(photos: Open) -> None:
    with pytest.raises(UserError, match="directories Validation and val are both the val split; merge them"):
        photos(*inside("train"), *inside("val"), *inside("Validation"))


def test_directories_next_to_splits_are_counted(photos: Open) -> None:
    data = photos(*inside("train"), *inside("val"), "raw/1.jpg", "raw/2.jpg", "cover.jpg", "README.md")
    assert (len(data.train), len(data.val)) == (60, 60)
    assert data.notes == (
        "photos: 1 file skipped: 1 not an image (.md)",
        "photos: 3 images outside of the split directories skipped: cover.jpg, raw/1.jpg, raw/2.jpg",
    )


def test_class_named_like_a_split_is_an_error(photos: Open) -> None:
    with pytest.raises(UserError, match="directory train is read as a split, .* images in bus, car.\nIf train is a"):
        photos("bus/1.jpg", "car/1.jpg", "train/1.jpg")


def test_other_names_of_splits_are_an_error(photos: Open) -> None:
    with pytest.raises(UserError, match="directory testing is not read as a split; rename it to test"):
        photos(*inside("training"), *inside("testing"))


def test_empty_split_directory_is_named(photos: Open) -> None:
    data = photos(*inside("train"), "val/")
    assert data.notes == ("photos: 1 directory without images: val",)
    assert "held out" in data.details["split"]


def test_missing_training_split_names_what_there_is(photos: Open) -> None:
    with pytest.raises(UserError, match="data.train_split=train: split not found in photos; available: Test"):
        photos(*inside("Test"))


# ------------------------------------------------------------------------------------------------ classes


def test_rows_and_classes_are_those_of_datasets(photos: Open, tmp_path: Path) -> None:
    """A plain directory gives the same rows in the same order: runs on it do not change."""
    import datasets

    names = ["a b", "a", "a-b", "B", "Ω", "a.b", "10", "9"]
    photos(*(f"{split}/{name}/{i}.jpg" for split in ("train", "val") for name in names for i in (1, 10, 9)))
    expected = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "photos"))
    found = open_splits(DataConfig(source="photos")).by_name
    for split, name in (("train", "train"), ("val", "validation")):
        rows = expected[name].cast_column("image", datasets.Image(decode=False))
        ours = found[split].cast_column("image", datasets.Image(decode=False))
        assert ours.features == rows.features
        assert ours[:] == rows[:]


def test_odd_file_names_are_read(photos: Open) -> None:
    names = [f"{name}/{file}" for name in ("cat [1]", "dog::x", "train\n%") for file in ODD_NAMES]
    data = photos(*names)
    assert read(data) == sorted(names)
    assert len(set(classes_by_path(data).values())) == 3


def test_name_that_is_not_utf8_is_counted(photos: Open, tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    with open(os.fsencode(tmp_path / "photos" / "cat") + b"/caf\xe9.jpg", "w"):
        pass
    data = photos(*CLASSES)
    assert len(read(data)) == 60
    assert data.notes == (r"photos: 1 file skipped: 1 with a name that is not valid UTF-8 (cat/caf\udce9.jpg)",)


def test_skipped_files_are_counted_in_one_line(photos: Open) -> None:
    data = photos(*CLASSES, *(f"dog/{i}.HEIC" for i in range(8)), "a.txt", "b.md", "cat/notes", "dog/c.txt")
    assert data.notes == (
        "photos: 12 files skipped: 8 .heic (install pillow-heif), 4 not images (.md, .txt, no suffix)",
    )


def test_class_that_cannot_be_read_is_named(photos: Open) -> None:
    with pytest.raises(
        UserError, match=r"no image of class bee can be read: 8 .heic \(install pillow-heif\).\nTo train"
    ):
        photos(*CLASSES, *(f"bee/{i}.heic" for i in range(8)))


def test_heic_is_read_if_pillow_heif_is_installed(
    photos: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugin = ModuleType("pillow_heif")
    plugin.__spec__ = type(sys.__spec__)("pillow_heif", None)  # type: ignore[union-attr]

    def register() -> None:
        Image.register_open("HEIF", lambda file, name: Image.new("L", (4, 4)), lambda start: start[4:8] == b"ftyp")

    plugin.register_heif_opener = register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pillow_heif", plugin)
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    monkeypatch.setattr(Image, "ID", list(Image.ID))
    from vit_scale.data.images import decode

    decode._register_heif.cache_clear()
    file_types.readable_suffixes.cache_clear()
    try:
        data = photos(*CLASSES, "bee/1.heic", "bee/2.heic")
        assert data.class_names == ("bee", "cat", "dog", "eel")
        (tmp_path / "photos/bee/1.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(20))
        assert count_channels(str(tmp_path / "photos/bee/1.heic")) == 1
    finally:
        decode._register_heif.cache_clear()
        file_types.readable_suffixes.cache_clear()


def test_empty_and_foreign_directories_are_named(photos: Open) -> None:
    data = photos(*CLASSES, "fox/", "annotations/a.xml")
    assert data.class_names == ("cat", "dog", "eel")
    assert data.notes[1] == "photos: 2 directories without images: annotations, fox"


def test_system_files_are_no_noise(photos: Open) -> None:
    noise = ("cat/.DS_Store", "dog/Thumbs.db", "dog/desktop.ini", "__MACOSX/cat/1.jpg", ".git/1.jpg", "cat/._1.jpg")
    assert photos(*CLASSES, *noise).notes == ()
    assert photos("cat/.hidden.jpg").notes == ("photos: 1 file skipped: 1 hidden (cat/.hidden.jpg)",)


def test_loose_images_next_to_classes_are_counted(photos: Open) -> None:
    data = photos(*CLASSES, *(f"{i}.jpg" for i in range(5)))
    assert len(read(data)) == 60
    assert data.notes == ("photos: 5 images outside of the class directories skipped: 0.jpg, 1.jpg, 2.jpg and 2 more",)


def test_loose_images_are_read_if_no_class_is_needed(photos: Open) -> None:
    data = photos(*CLASSES, "1.jpg", "2.jpg", "cat/2020/1.jpg", target=NoTarget())
    assert len(read(data)) == 63
    assert data.notes == ("photos: images of deeper directories belong to the class above: cat/2020 to cat",)


def test_deeper_directories_belong_to_the_class_above(photos: Open) -> None:
    data = photos(*CLASSES, "cat/2020/1.jpg", "cat/2020/may/1.jpg")
    assert {path: name for path, name in classes_by_path(data).items() if "2020" in path} == {
        "cat/2020/1.jpg": "cat",
        "cat/2020/may/1.jpg": "cat",
    }
    assert data.notes == (
        "photos: images of deeper directories belong to the class above: cat/2020 to cat (and 1 other)",
    )


def test_repeated_directories_within_classes_are_no_classes(photos: Open) -> None:
    """As in Tiny ImageNet."""
    data = photos(*(f"train/{name}/images/{i}.jpg" for name in "abc" for i in range(9)))
    assert data.class_names == ("a", "b", "c")


def test_doubtful_level_of_classes_is_an_error_until_chosen(photos: Open) -> None:
    names = [f"{path}/{i}.jpg" for path in ("pets/cat", "pets/dog", "wild/fox") for i in range(20)]
    with pytest.raises(UserError, match=r"class_level=1 \(pets, wild\) or data.class_level=2 \(cat, dog, fox\)"):
        photos(*names)
    assert photos(class_level=1).class_names == ("pets", "wild")
    assert photos(class_level=2).class_names == ("cat", "dog", "fox")
    assert len(read(photos(target=NoTarget()))) == 60
    with pytest.raises(UserError, match="60 images, but no class directories at level 3"):
        photos(class_level=3)


def test_directory_around_splits_is_an_error(photos: Open) -> None:
    with pytest.raises(UserError, match="its only directory, archive, contains the splits train, val; set .*/archive"):
        photos(*inside("archive/train"), *inside("archive/val"))


def test_one_class_is_accepted_with_a_warning(photos: Open) -> None:
    data = photos(*(f"cat/{i}.jpg" for i in range(40)))
    assert data.class_names == ("cat",)
    assert data.notes == ("photos: only one class (cat), so there is nothing to learn",)


def test_images_of_unknown_format_only(photos: Open) -> None:
    with pytest.raises(
        UserError, match=r"no images, .*\(9 files skipped: 8 .heic \(install pillow-heif\), 1 not an im"
    ):
        photos(*(f"cat/{i}.heic" for i in range(8)), "a.txt")


# -------------------------------------------------------------------------------------- links, parquet files, ranks


def test_links_are_followed_and_loops_end(photos: Open, tmp_path: Path) -> None:
    photos(*CLASSES)
    (tmp_path / "elsewhere").mkdir()
    for name in "ab":
        (tmp_path / "elsewhere" / f"{name}.jpg").touch()
    (tmp_path / "photos/cat/linked.jpg").symlink_to(tmp_path / "elsewhere/a.jpg")
    (tmp_path / "photos/cat/broken.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (tmp_path / "photos/cat/loop").symlink_to(tmp_path / "photos")
    (tmp_path / "photos/fox").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "photos/dog/pipe.jpg")
    data = photos()
    assert read(data) == sorted([*CLASSES, "cat/linked.jpg", "fox/a.jpg", "fox/b.jpg"])
    assert "2 broken links or special files (cat/broken.jpg)" in data.notes[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_directory_without_permission_is_named(photos: Open, tmp_path: Path) -> None:
    photos(*CLASSES)
    (tmp_path / "photos/cat").chmod(0)
    try:
        with pytest.raises(UserError, match="photos/cat: cannot be read: Permission denied"):
            photos()
    finally:
        (tmp_path / "photos/cat").chmod(0o700)


def test_images_next_to_parquet_files_are_counted(photos: Open, tmp_path: Path) -> None:
    import datasets

    (tmp_path / "photos").mkdir()
    rows = {"image": [{"bytes": b"", "path": None}] * 8, "label": [0, 1] * 4}
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "photos/train.parquet")
    data = photos("assets/figure.png", val_fraction=0.5)
    assert data.notes == ("photos: 1 image file skipped: the parquet files (train.parquet) are read instead",)
    datasets.Dataset.from_dict({"x": [1]}).to_parquet(tmp_path / "photos/train.parquet")
    with pytest.raises(
        UserError, match=r"parquet files without images \(train.parquet\);\nset data.labels=train.parquet"
    ):
        photos()


def test_every_process_gets_the_same_rows_and_fingerprint(photos: Open, tmp_path: Path) -> None:
    data = photos(*CLASSES, "cat/ü.jpg")
    code = (
        "from vit_scale.data.data import open_data; from vit_scale.config import DataConfig;"
        "data = open_data(DataConfig(source='photos'), seed=0).train;"
        "print(data.dataset._fingerprint, *(data.read(i).image for i in range(len(data))), sep='|')"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=True
    )
    paths = [data.train.read(i).image for i in range(len(data.train))]
    assert done.stdout.strip().split("|") == [data.train.dataset._fingerprint, *paths]
    assert photos("cat/new.jpg").train.dataset._fingerprint != data.train.dataset._fingerprint


def test_workers_receive_the_source(photos: Open) -> None:
    data = photos(*CLASSES)
    assert pickle.loads(pickle.dumps(data.train)).read(5) == data.train.read(5)


def test_streaming_is_rejected(photos: Open) -> None:
    with pytest.raises(UserError, match="data.streaming: photos is a directory of images.*set data.streaming=false"):
        photos(*CLASSES, streaming=True)


# ---------------------------------------------------------------------------------------- header and warnings


def test_header_names_the_smallest_and_the_largest_class(photos: Open) -> None:
    data = photos(*CLASSES, *(f"cat/x{i}.jpg" for i in range(20)), "train_me_not/1.jpg")
    assert data.description == "photos (73 training images, 8 validation images, 4 classes)"
    assert data.details["classes"] == "1 (train_me_not) to 36 (cat) training images"


def test_imbalance_names_the_options_that_help(photos: Open) -> None:
    data = photos(*(f"cat/{i}.jpg" for i in range(300)), *(f"dog/{i}.jpg" for i in range(25)))
    assert data.notes == (
        "photos: classes are imbalanced 12:1 (270 of cat, 23 of dog); "
        "consider data.balance=true or optim.class_weights=balanced",
    )


def test_few_validation_images_are_one_line(photos: Open) -> None:
    data = photos(*(f"{name:04}/{i}.jpg" for name in range(300) for i in range(10)))
    assert data.notes == (
        "photos: all 300 classes have fewer than 2 validation images; raise data.val_fraction or add images",
    )
    data = photos(*inside("train"), *inside("val", "cat/1.jpg", "cat/2.jpg", "dog/1.jpg"), val_split="val")
    assert "photos: class dog has fewer than 2 validation images; add validation images" in data.notes


def test_classes_of_one_split_only_are_named(photos: Open) -> None:
    data = photos(*inside("train"), *inside("val", "cat/1.jpg", "cat/2.jpg", "fox/1.jpg", "fox/2.jpg"))
    assert data.class_names == ("cat", "dog", "eel", "fox")
    assert data.notes == (
        "photos: 2 of 4 classes (dog, eel) are in the training split only",
        "photos: class fox is in the validation split only",
    )
