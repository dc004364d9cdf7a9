"""Labels from tables: files and columns are found, and everything that does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit_scale.config import DataConfig
from vit_scale.data.data import Data, open_data
from vit_scale.data.spatial_targets import BoxTarget, MaskTarget, decode_mask
from vit_scale.data.targets import NoTarget, Target, TextTarget
from vit_scale.errors import UserError

Open = Callable[..., Data]
FILES = tuple(f"{i}.jpg" for i in range(40))
LABELS = "file,label\n" + "".join(f"{file},{'cat' if i % 2 else 'dog'}\n" for i, file in enumerate(FILES))


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Create empty images and tables below `photos`, and open the directory."""
    monkeypatch.chdir(tmp_path)

    def build(
        *paths: str, tables: Mapping[str, str] | None = None, target: Target | None = None, **options: Any
    ) -> Data:
        for path, text in (dict.fromkeys(paths, "") | dict(tables or {})).items():
            file = tmp_path / "photos" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return open_data(DataConfig(source="photos", **options), target, seed=0)

    return build


def targets(data: Data) -> dict[str, Any]:
    """The target of each file, by name of the class if there are classes."""
    samples = [source.read(i) for source in (data.train, data.val) for i in range(len(source))]
    names = data.class_names
    return {
        sample.image.partition("/photos/")[2]: names[sample.target] if names else sample.target for sample in samples
    }


EXPECTED = {file: "cat" if i % 2 else "dog" for i, file in enumerate(FILES)}


def as_jsonl(rows: str) -> str:
    header, *lines = (line.split(",") for line in rows.splitlines())
    return "".join(json.dumps(dict(zip(header, line, strict=True))) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.csv", LABELS),
        ("labels.csv", "\ufeff" + LABELS.replace(",", " ; ")),
        ("labels.csv", LABELS.replace("file,label", "Id,breed").replace(".jpg", "")),
        ("labels.csv", LABELS.replace("file,", "Image , ").replace("\n", "\r\n")),
        ("labels.tsv", LABELS.replace(",", "\t")),
        ("labels.jsonl", as_jsonl(LABELS)),
        ("tables/labels.csv", LABELS),
        ("labels.csv", "".join(f"./{line}\n" if line[0].isdigit() else f"{line}\n" for line in LABELS.splitlines())),
    ],
    ids=["csv", "semicolons", "no suffix", "spaces", "tsv", "jsonl", "another directory", "dots"],
)
def test_tables_of_files_and_labels(name: str, text: str, photos: Open) -> None:
    data = photos(*FILES, tables={name: text}, labels=name)
    assert data.class_names == ("cat", "dog")
    assert targets(data) == EXPECTED
    assert data.notes == ()


def test_parquet_table_and_table_of_the_working_directory(photos: Open, tmp_path: Path) -> None:
    import datasets

    rows = {"path": [f"{tmp_path}/photos/{file}" for file in FILES], "y": [EXPECTED[file] for file in FILES]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "there.parquet")
    assert targets(photos(*FILES, labels="there.parquet")) == EXPECTED


def test_columns_by_option(photos: Open) -> None:
    text = "key,file,shape,label\n" + "".join(f"{file},x,{i % 3},z\n" for i, file in enumerate(FILES))
    data = photos(*FILES, tables={"l.csv": text}, labels="l.csv", image_column="key", label_column="shape")
    assert targets(data) == {file: str(i % 3) for i, file in enumerate(FILES)}
    for option, message in (
        (
            {"image_column": "nope"},
            "data.image_column=nope: column not found in data.labels=l.csv; .* key, file, shape",
        ),
        (
            {"label_column": "nope", "image_column": "key"},
            "data.label_column=nope: column not found in data.labels=l.csv",
        ),
    ):
        with pytest.raises(UserError, match=message):
            photos(labels="l.csv", **option)


def test_unknown_columns_are_named(photos: Open) -> None:
    with pytest.raises(UserError, match="no column of files; its columns are a, b; choose one with data.image_column"):
        photos(*FILES, tables={"l.csv": "a,b\n0.jpg,2\n"}, labels="l.csv")
    with pytest.raises(UserError, match="no column of labels; its columns are b, c; choose one with data.label_column"):
        photos(tables={"l.csv": "file,b,c\n0.jpg,2,3\n"}, labels="l.csv")
    with pytest.raises(UserError, match="several columns"):
        photos(tables={"l.csv": "file,label,label\n0.jpg,2,3\n"}, labels="l.csv")


def test_missing_files_are_named_or_skipped(photos: Open) -> None:
    text = LABELS + "x.jpg,cat\ny.jpg,dog\nz.jpg,dog\nphone.heic,cat\n"
    message = (
        r"4 of 44 files not found in photos \(1 .heic \(install pillow-heif\)\): x.jpg, y.jpg, z.jpg and 1 more; "
        "set data.on_error=skip"
    )
    with pytest.raises(UserError, match=message):
        photos(*FILES, "phone.heic", tables={"l.csv": text}, labels="l.csv")
    data = photos(labels="l.csv", on_error="skip")
    assert targets(data) == EXPECTED
    assert "4 of 44 files not found" in data.notes[0]
    with pytest.raises(UserError, match="1 of 1 files not found .*: x.jpg; files are relative to data.source"):
        photos(tables={"l.csv": "file,label\nx.jpg,1\n"}, labels="l.csv", on_error="skip")


def test_name_that_fits_several_files_is_not_guessed(photos: Open) -> None:
    with pytest.raises(
        UserError, match=r"1 of 1 files not found .*\(1 fit several files: their directories are needed"
    ):
        photos("a/1.jpg", "b/1.jpg", tables={"l.csv": "id,label\n1,x\n"}, labels="l.csv")


def test_repeated_rows_are_counted_and_two_labels_are_an_error(photos: Open) -> None:
    data = photos(*FILES, tables={"labels.csv": f"{LABELS}0.jpg,dog\n"}, labels="labels.csv")
    assert targets(data) == EXPECTED
    assert len(data.train) + len(data.val) == len(FILES)
    assert data.notes == ("data.labels=labels.csv: 1 repeated row skipped: 0.jpg",)
    with pytest.raises(UserError, match="0.jpg has two labels, in rows 1 and 41"):
        photos(tables={"labels.csv": f"{LABELS}0.jpg,cat\n"}, labels="labels.csv")


def test_images_without_a_row_and_rows_without_a_label_are_counted(photos: Open) -> None:
    data = photos(*FILES, "x.jpg", "y.jpg", "z.jpg", tables={"l.csv": LABELS + "x.jpg,\ny.jpg,  \n"}, labels="l.csv")
    assert targets(data) == EXPECTED
    assert data.notes == (
        "data.labels=l.csv: 2 rows without a label skipped: x.jpg, y.jpg",
        "data.labels=l.csv: 1 image without a row skipped: z.jpg",
    )


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["3", "1", "2"], ("0", "1", "2", "3")),
        (["003", "001", "002"], ("001", "002", "003")),
        (["1.0", "0.0", ""], ("0", "1")),
        (["true", "NA", "null"], ("NA", "null", "true")),
        (["猫", "a, b", 'x "y"'], ("a, b", 'x "y"', "猫")),
    ],
)
def test_kinds_of_labels(labels: list[str], names: tuple[str, ...], photos: Open) -> None:
    quoted = ['"' + label.replace('"', '""') + '"' for label in labels]
    text = "file,label\n" + "".join(f"{file},{quoted[i % 3]}\n" for i, file in enumerate(FILES))
    data = photos(*FILES, tables={"l.csv": text}, labels="l.csv")
    assert data.class_names == names
    expected = {file: labels[i % 3].removesuffix(".0") for i, file in enumerate(FILES) if labels[i % 3]}
    assert targets(data) == expected


@pytest.mark.parametrize(
    ("labels", "message"), [("1.5", "labels have type double"), ("1000000000", "labels up to 1,0")]
)
def test_labels_that_are_no_classes(labels: str, message: str, photos: Open) -> None:
    with pytest.raises(UserError, match=message):
        photos(
            *FILES, tables={"l.csv": f"file,label\n0.jpg,{labels}\n1.jpg,2.5\n".replace("2.5", labels)}, labels="l.csv"
        )


def test_split_column_and_classes_of_all_splits(photos: Open) -> None:
    text = "file,label,Split\n" + "".join(
        f"{f},{'abc'[i // 15]},{'Val' if i >= 30 else 'train'}\n" for i, f in enumerate(FILES)
    )
    data = photos(*FILES, tables={"l.csv": text}, labels="l.csv")
    assert (len(data.train), len(data.val)) == (30, 10)
    assert data.class_names == ("a", "b", "c")
    assert "photos: class c is in the validation split only" in data.notes


def test_split_directories_apply_to_tables(photos: Open) -> None:
    text = "file,label\n" + "".join(f"{s}/{file},{EXPECTED[file]}\n" for s in ("Train", "test") for file in FILES)
    data = photos(*(f"{s}/{file}" for s in ("Train", "test") for file in FILES), tables={"l.csv": text}, labels="l.csv")
    assert (len(data.train), len(data.val)) == (40, 40)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("file,label\n", "cannot be read|no row"),
        ("file,label\n0.jpg,a,b\n", "cannot be read: .*Expected 2 columns, got 3"),
    ],
)
def test_unreadable_tables(text: str, message: str, photos: Open) -> None:
    with pytest.raises(UserError, match=message):
        photos(*FILES, tables={"l.csv": text}, labels="l.csv")


def test_missing_table_and_other_sources(photos: Open) -> None:
    with pytest.raises(UserError, match="data.labels=label.csv: file not found in .*photos .*found there: labels.csv"):
        photos(*FILES, tables={"labels.csv": LABELS}, labels="label.csv")
    with pytest.raises(UserError, match="expected a .csv, .tsv, .jsonl or .parquet file"):
        photos(tables={"labels.xlsx": ""}, labels="labels.xlsx")
    with pytest.raises(UserError, match="data.labels=l.csv: applies to a directory of images"):
        open_data(DataConfig(labels="l.csv"), seed=0)


# ----------------------------------------------------------------------------------------- metadata of the Hub


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_metadata_convention_gives_the_rows_of_datasets(kind: str, photos: Open, tmp_path: Path) -> None:
    import datasets

    for split, order in (("train", 1), ("validation", -1)):
        (tmp_path / "photos" / split).mkdir(parents=True)
        files = FILES[::order]
        rows = {"file_name": list(files), "label": [EXPECTED[f] for f in files], "text": [f"photo {f}" for f in files]}
        getattr(datasets.Dataset.from_dict(rows), {"csv": "to_csv", "jsonl": "to_json", "parquet": "to_parquet"}[kind])(
            tmp_path / "photos" / split / f"metadata.{kind}"
        )
    data = photos(*(f"{split}/{file}" for split in ("train", "validation") for file in FILES), target=TextTarget())
    expected = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "photos"))
    for split, source in (("train", data.train), ("validation", data.val)):
        rows = expected[split].cast_column("image", datasets.Image(decode=False))
        assert [source.read(i).image for i in range(40)] == [row["path"] for row in rows["image"]]
        assert [source.read(i).target for i in range(40)] == [[text] for text in rows["text"]]
    assert photos().class_names == ("cat", "dog"), "the same table has labels"


def test_metadata_without_labels_leaves_them_to_the_directories(photos: Open) -> None:
    names = [f"{name}/{i}.jpg" for name in ("cat", "dog") for i in range(20)]
    text = "file_name,text\n" + "".join(f"{name},a photo\n" for name in names[:39])
    data = photos(*names, tables={"metadata.csv": text})
    assert targets(data) == {name: name[:3] for name in names[:39]}
    assert data.notes == ("photos: metadata.csv: 1 image without a row skipped: dog/19.jpg",)


def test_metadata_without_files_is_named(photos: Open) -> None:
    with pytest.raises(UserError, match="photos: metadata.csv: no column file_name; its columns are filename, text"):
        photos(*FILES, tables={"metadata.csv": "filename,text\n0.jpg,x\n"})
    with pytest.raises(UserError, match=r"has both metadata.csv and metadata.jsonl; move one, or set data.labels"):
        photos(tables={"metadata.jsonl": as_jsonl(LABELS.replace("file,", "file_name,"))})


def test_masks_and_boxes_of_metadata(photos: Open, tmp_path: Path) -> None:
    names = [f"images/{i}.jpg" for i in range(4)]
    rows = [
        {
            "file_name": name,
            "mask_file_name": f"masks/{i}.png",
            "objects": {"bbox": [[1.0, 2.0, 3.0, 4.0]] * (i % 2), "category": [5] * (i % 2)},
        }
        for i, name in enumerate(names)
    ]
    tables = {"metadata.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}
    (tmp_path / "photos/masks").mkdir(parents=True)
    for i in range(4):
        Image.fromarray(np.full((4, 4), i, np.uint8)).save(tmp_path / f"photos/masks/{i}.png")
    data = photos(*names, tables=tables, target=MaskTarget())
    assert {path: int(decode_mask(mask)[0, 0]) for path, mask in targets(data).items()} == {
        name: i for i, name in enumerate(names)
    }
    assert data.notes == ()
    boxes = targets(photos(target=BoxTarget()))
    assert [len(boxes[name].classes) for name in names] == [0, 1, 0, 1]
    (tmp_path / "photos/masks/3.png").unlink()
    with pytest.raises(UserError, match="column mask_file_name: 1 of 4 files not found: masks/3.png"):
        photos(target=MaskTarget())


def test_several_captions_per_image_and_no_target(photos: Open) -> None:
    text = "file_name,text\n0.jpg,one\n0.jpg,two\n1.jpg,three\n"
    data = photos(*FILES, tables={"metadata.csv": text}, target=TextTarget())
    assert len(data.train) + len(data.val) == 3
    assert len(photos(target=NoTarget()).train) == 2


def test_paths_above_the_directory_are_not_read(photos: Open, tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").touch()
    with pytest.raises(UserError, match="1 of 1 files not found in photos: ../secret.jpg"):
        photos(*FILES, tables={"metadata.csv": "file_name,label\n../secret.jpg,x\n"})
