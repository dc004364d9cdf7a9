"""Open a dataset by name, from a directory or the Hub, and explain what is missing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vit_scale.config import DataConfig
from vit_scale.data.sources.embedded import digits
from vit_scale.data.sources.image_folder import read_image_folder
from vit_scale.data.sources.label_table import read_labeled_folder
from vit_scale.data.sources.scan import Scan, describe_skipped, scan_directory
from vit_scale.data.targets import ClassTarget, Target
from vit_scale.errors import UserError, first_line, nearest
from vit_scale.format import counted, some
from vit_scale.hub import is_hub_reachable, offline

_VAL = ("validation", "val", "valid", "dev")
_SAME_SPLIT = (("train", "training"), _VAL, ("test", "testing"))
"""Names of the same split; capitals make no difference."""


@dataclass(frozen=True)
class Splits:
    """All splits of a source by name."""

    by_name: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """What was skipped, for the user."""


def open_splits(config: DataConfig, target: Target | None = None) -> Splits:
    """Return all splits of the source; rows are read from disk on demand.

    `target`: what is read next to an image (default: class labels); images without a class are skipped only for labels.
    """
    source = config.source
    directory = Path(source).expanduser()
    if config.labels is not None and not directory.is_dir():
        raise UserError(f"data.labels={config.labels}: applies to a directory of images; data.source={source} is none")
    if source.startswith("embedded:"):
        if source != "embedded:digits":
            raise UserError(f"data.source={source}: unknown embedded dataset; available: embedded:digits")
        return Splits({"train": digits()})
    if directory.is_dir():
        return _open_directory(directory, config, needs_class=target is None or isinstance(target, ClassTarget))
    _check_hub_id(source, directory)
    return Splits(_open_hub(config))


def pick_splits(config: DataConfig, splits: Mapping[str, Any]) -> tuple[Any, Any | None, str]:
    """Return the training split, the validation split and the name of the latter.

    The validation split is None if it must be held out.
    """
    train = _split(splits, config.train_split, "data.train_split", config)
    if config.val_split is not None:
        return train, _split(splits, config.val_split, "data.val_split", config), config.val_split
    used = {_find_split(name, splits) for name in _names_in(config.train_split, splits)}
    for name in (*_VAL, "test"):
        found = _find_name(name, splits)
        if found is not None and found not in used:
            return train, splits[found], found
    return train, None, ""


def unused_splits(config: DataConfig, splits: Mapping[str, Any], val_split: str | None) -> list[str]:
    """Return the splits of which nothing is read for training and validation."""
    names = [name for spec in (config.train_split, val_split or "") for name in _names_in(spec, splits)]
    used = {_find_split(name, splits) for name in names}
    return [name for name in splits if name not in used]


def overlap_note(config: DataConfig, splits: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a warning if a validation split that the user chose has rows of the training split."""
    if config.val_split is None or config.streaming:
        return ()
    train = _parts(splits, config.train_split, "data.train_split", config)
    val = _parts(splits, config.val_split, "data.val_split", config)
    if not any(a.split == b.split and max(a.start, b.start) < min(a.stop, b.stop) for a in train for b in val):
        return ()
    chosen = f"data.val_split={config.val_split} overlaps data.train_split={config.train_split}"
    return (f"{config.source}: {chosen}: results on images of the training split say little about others",)


class _Part(NamedTuple):
    """Rows of a split."""

    split: str
    start: int
    stop: int


def _split(splits: Mapping[str, Any], spec: str, key: str, config: DataConfig) -> Any:
    """Return a split by name, or what a split expression such as `train[:10%]+test` means in `datasets`."""
    import datasets

    if (name := _find_split(spec, splits)) is not None:
        return splits[name]
    tables = [splits[part.split].select(range(part.start, part.stop)) for part in _parts(splits, spec, key, config)]
    try:
        return tables[0] if len(tables) == 1 else datasets.concatenate_datasets(tables)
    except ValueError as error:
        raise UserError(f"{key}={spec}: splits with different columns: {first_line(error)}") from error


def _parts(splits: Mapping[str, Any], spec: str, key: str, config: DataConfig) -> list[_Part]:
    """Return the rows of a split, or of a split expression."""
    import datasets

    if (name := _find_split(spec, splits)) is not None:
        return [_Part(name, 0, len(splits[name]))]
    names: dict[str, str] = {}
    for name in _names_in(spec, splits):
        found = _find_split(name, splits)
        if found is None:
            which = "split" if name == spec else f"split {name}"
            raise UserError(f"{key}={spec}: {which} not found in {config.source}; available: {', '.join(splits)}")
        names[name] = found
    if config.streaming:
        raise UserError(f"{key}={spec}: streams cannot be sliced; name a full split, or set data.streaming=false")
    try:
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute({n: len(splits[f]) for n, f in names.items()})
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"{key}={spec}: invalid split; expected e.g. train[:10%], train[100:200] or train[:10]+train[20:] "
            f"({first_line(error)})"
        ) from error
    if not any(part.from_ < part.to for part in parts):
        raise UserError(f"{key}={spec}: has no images; sizes: {_sizes(names, splits)}")
    return [_Part(names[part.splitname], part.from_, part.to) for part in parts]


def _sizes(names: Mapping[str, str], splits: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {len(splits[found]):,}" for name, found in names.items())


def _names_in(spec: str, splits: Mapping[str, Any]) -> list[str]:
    """Return the names of splits in a split expression."""
    if spec in splits:
        return [spec]
    return [re.split(r"[\[(]", part.strip())[0] for part in spec.split("+")]


def _find_split(name: str, splits: Mapping[str, Any]) -> str | None:
    """Return the split of this name, or of another name that means the same."""
    group = next((names for names in _SAME_SPLIT if name.lower() in names), ())
    found = (_find_name(each, splits) for each in (name, *group))
    return next((split for split in found if split is not None), None)


def _find_name(name: str, splits: Mapping[str, Any]) -> str | None:
    """Return the split of exactly this name, or of this name in other capitals."""
    return name if name in splits else next((split for split in splits if split.lower() == name.lower()), None)


def _open_directory(directory: Path, config: DataConfig, *, needs_class: bool) -> Splits:
    import datasets

    try:
        if (directory / "dataset_dict.json").exists() or (directory / "state.json").exists():
            loaded = datasets.load_from_disk(str(directory))
            return Splits(loaded if isinstance(loaded, Mapping) else {"train": loaded})
        scan = scan_directory(str(directory.resolve()))
        if scan.parquet and not config.labels:
            return _open_parquet(scan, config)
        return _open_images(scan, config, needs_class=needs_class)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"data.source={config.source}: cannot be read: {first_line(error)}") from error


def _open_parquet(scan: Scan, config: DataConfig) -> Splits:
    import datasets

    streaming = {"streaming": True} if config.streaming else {}
    splits = datasets.load_dataset("parquet", data_dir=scan.root, **streaming)
    if not scan.count:
        return Splits(splits)
    features = next(iter(splits.values())).features
    if not any(isinstance(each, datasets.Image | datasets.Array2D | datasets.Array3D) for each in features.values()):
        raise UserError(
            f"data.source={config.source}: has {scan.count:,} image files, and parquet files without images "
            f"({some(scan.parquet)});\nset data.labels={scan.parquet[0]} if it has the labels, otherwise move it away"
        )
    note = f"{counted(scan.count, 'image file')} skipped: the parquet files ({some(scan.parquet)}) are read instead"
    return Splits(splits, (f"{config.source}: {note}",))


def _open_images(scan: Scan, config: DataConfig, *, needs_class: bool) -> Splits:
    if not scan.count:
        skipped = describe_skipped(scan.unreadable, scan.others)
        raise UserError(
            f"data.source={config.source}: no images, parquet files or saved dataset in this directory"
            f"{f' ({skipped})' if skipped else ''}; expected one directory per class, optionally inside train/ and val/"
        )
    if config.streaming:
        raise UserError(
            f"data.streaming: {config.source} is a directory of images, which are read from disk on demand anyway; "
            "set data.streaming=false"
        )
    read = read_labeled_folder if config.labels or scan.metadata else read_image_folder
    return Splits(*read(scan, config, needs_class=needs_class))


def _check_hub_id(source: str, directory: Path) -> None:
    looks_like_path = source.startswith(("/", ".", "~")) or source.count("/") > 1 or directory.exists()
    if not looks_like_path:
        return
    hint = ""
    if directory.parent.is_dir():
        near = nearest(directory.name, [p.name for p in directory.parent.iterdir() if p.is_dir()])
        hint = f"; nearest: {directory.parent / near[0]}" if near else ""
    problem = "is a file; expected a directory" if directory.exists() else "directory not found"
    raise UserError(f"data.source={source}: {problem}{hint}")


def _open_hub(config: DataConfig) -> Mapping[str, Any]:
    import datasets
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError

    where = f"data.source={config.source}"
    online = is_hub_reachable()
    try:
        with contextlib.nullcontext() if online else offline():
            return datasets.load_dataset(config.source, config.name, streaming=config.streaming)
    except datasets.exceptions.DatasetNotFoundError as error:
        if "gated" in str(error).lower():
            raise UserError(f"{where}: gated on the Hub; accept its terms there, then run `hf auth login`") from error
        raise UserError(
            f"{where}: neither a directory nor a Hub dataset (private datasets require `hf auth login`)"
        ) from error
    except GatedRepoError as error:
        raise UserError(f"{where}: gated on the Hub; accept its terms there, then run `hf auth login`") from error
    except (ConnectionError, FileNotFoundError) as error:
        if online:
            raise UserError(f"{where}: the Hub did not respond: {first_line(error)}; try again") from error
        raise UserError(
            f"{where}: directory not found, and the Hub is unreachable; "
            "check the network, or name a directory of images or parquet files"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{where}: cannot be opened: {first_line(error)}") from error
