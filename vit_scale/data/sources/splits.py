"""Open a dataset by name, from a directory or the Hub, and explain what is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_scale.config import DataConfig
from vit_scale.data.sources.embedded import digits
from vit_scale.errors import UserError, first_line, nearest
from vit_scale.hub import hub_answers, offline

_VAL_SPLITS = ("validation", "val", "valid", "dev", "test")
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif"}


def open_splits(config: DataConfig) -> Mapping[str, Any]:
    """Return all splits of the source by name; rows are read from disk on demand."""
    source = config.source
    if source.startswith("embedded:"):
        if source != "embedded:digits":
            raise UserError(f"data.source={source}: unknown embedded dataset; available: embedded:digits")
        return {"train": digits()}
    directory = Path(source).expanduser()
    if directory.is_dir():
        return _open_directory(directory, config)
    _check_hub_id(source, directory)
    return _open_hub(config)


def pick_splits(config: DataConfig, splits: Mapping[str, Any]) -> tuple[Any, Any | None]:
    """Return the training split and the validation split, None if one must be held out."""
    train = _split(splits, config.train_split, "data.train_split", config)
    if config.val_split is not None:
        return train, _split(splits, config.val_split, "data.val_split", config)
    train_name = config.train_split.split("[")[0]
    found = [name for name in _VAL_SPLITS if name in splits and name != train_name]
    return train, splits[found[0]] if found else None


def _split(splits: Mapping[str, Any], spec: str, key: str, config: DataConfig) -> Any:
    """Return a split by name, or a slice of one such as `train[:10%]`."""
    import datasets

    if config.streaming and "[" in spec:
        raise UserError(f"{key}={spec}: streams cannot be sliced; name a full split, or set data.streaming=false")
    name = spec.split("[")[0]
    if name not in splits:
        raise UserError(f"{key}={spec}: split not found in {config.source}; available: {', '.join(splits)}")
    if config.streaming or name == spec:
        return splits[name]
    try:
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute({name: len(splits[name])})
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"{key}={spec}: invalid slice; expected e.g. {name}[:10%] or {name}[100:200] ({error})"
        ) from error
    return splits[name].select(
        range(parts[0].from_ or 0, parts[0].to if parts[0].to is not None else len(splits[name]))
    )


def _open_directory(directory: Path, config: DataConfig) -> Mapping[str, Any]:
    import datasets

    streaming = {"streaming": True} if config.streaming else {}
    try:
        if (directory / "dataset_dict.json").exists() or (directory / "state.json").exists():
            loaded = datasets.load_from_disk(str(directory))
            return loaded if isinstance(loaded, Mapping) else {"train": loaded}
        kind = "parquet" if next(directory.rglob("*.parquet"), None) else "imagefolder"
        if kind == "imagefolder" and not _has_images(directory):
            raise UserError(
                f"data.source={config.source}: no images, parquet files or saved dataset in this directory; "
                "expected one directory per class, optionally inside train/ and val/"
            )
        return datasets.load_dataset(kind, data_dir=str(directory.resolve()), **streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"data.source={config.source}: cannot be read: {first_line(error)}") from error


def _has_images(directory: Path) -> bool:
    return any(path.suffix.lower() in IMAGE_SUFFIXES for path in directory.rglob("*"))


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
    online = hub_answers()
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
