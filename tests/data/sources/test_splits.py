"""Split names and split expressions mean what they mean in `datasets`, or are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vit_scale.config import DataConfig
from vit_scale.data.sources.splits import open_splits, pick_splits
from vit_scale.errors import UserError

EXPRESSIONS = [
    "train",
    "train[:10]+train[20:]",
    "train[:10] + train[5:15]",
    "train[:10%]",
    "train[10%:]",
    "train[-5%:]",
    "train[33%:67%]",
    "train[:-3]",
    "train[1_0:2_0]",
    "train[:10%](pct1_dropremainder)",
    "train[:1]+validation[:1]",
    "train[5:500]",
    "validation[50%:]+train",
]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory of parquet files with 137 and 13 rows; `id` counts over both splits."""
    import datasets

    directory = tmp_path_factory.mktemp("parquet")
    for name, rows in (("train", range(137)), ("validation", range(137, 150))):
        datasets.Dataset.from_dict({"id": list(rows)}).to_parquet(directory / f"{name}.parquet")
    return str(directory)


def pick(by_name: dict[str, Any], **options: Any) -> tuple[list[int], list[int] | None]:
    train, val, _ = pick_splits(DataConfig(source="x", **options), by_name)
    return train["id"][:], None if val is None else val["id"][:]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_split_expressions_mean_what_they_mean_in_datasets(expression: str, parquet: str) -> None:
    import datasets

    expected = datasets.load_dataset("parquet", data_dir=parquet, split=expression.replace(" ", ""))["id"][:]
    by_name = dict(open_splits(DataConfig(source=parquet)).by_name)
    assert pick(by_name, train_split=expression)[0] == expected
    assert pick(by_name, val_split=expression)[1] == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("train[10:%]", "invalid split"),
        ("train[7:7]+validation[20:]", "has no images"),
        ("train[:10](closest)", "invalid split"),
        ("train[:10%](up)", "invalid split"),
        ("train[:200%]", "invalid split"),
        ("train[", "invalid split"),
        ("train[:1]+", "not found"),
        ("train[:1]+other[:2]", "split other not found in x; available: train, validation"),
        ("validation[:50%](pct1_dropremainder)", "invalid split"),
        ("", "not found"),
    ],
)
def test_other_expressions_are_rejected_in_one_line(expression: str, message: str, parquet: str) -> None:
    by_name = dict(open_splits(DataConfig(source=parquet)).by_name)
    with pytest.raises(UserError, match=message) as error:
        pick(by_name, train_split=expression)
    assert "\n" not in str(error.value)


def tables(*names: str) -> dict[str, Any]:
    import datasets

    return {name: datasets.Dataset.from_dict({"id": [number]}) for number, name in enumerate(names)}


@pytest.mark.parametrize("found", ["val", "Valid", "VALIDATION", "dev"])
@pytest.mark.parametrize("named", ["val", "valid", "validation", "dev", "Val", None])
def test_validation_split_is_found_under_any_of_its_names(found: str, named: str | None) -> None:
    assert pick(tables("test", "Train", found), val_split=named) == ([1], [2])


def test_exact_name_comes_first() -> None:
    by_name = tables("Train", "train", "dev", "val", "test")
    assert pick(by_name, val_split="val") == ([1], [3])
    assert pick(by_name, train_split="Train", val_split="dev") == ([0], [2])
    assert pick(tables("train", "test")) == ([0], [1])
    assert pick(tables("train", "extra")) == ([0], None)
    assert pick(tables("train", "val"), train_split="val[:1]+train") == ([1, 0], None)


def test_splits_with_different_columns_are_not_joined() -> None:
    import datasets

    by_name = {**tables("train"), "test": datasets.Dataset.from_dict({"id": ["a"]})}
    with pytest.raises(UserError, match=r"data.train_split=train\+test: splits with different columns"):
        pick(by_name, train_split="train+test")


def test_saved_dataset_with_capitals(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict(tables("Train", "Val")).save_to_disk(tmp_path / "saved")
    by_name = dict(open_splits(DataConfig(source=str(tmp_path / "saved"))).by_name)
    assert pick(by_name, train_split="train", val_split="validation[:1]") == ([0], [1])
