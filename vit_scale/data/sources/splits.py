"""Opening a dataset by name: folders, hub ids, and clear words for what cannot be had."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_scale.config import DataConfig
from vit_scale.data.sources.embedded import digits
from vit_scale.errors import UserError, nearest
from vit_scale.hub import is_hub_reachable, offline

_VAL_SPLITS = ("validation", "val", "valid", "dev", "test")
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif"}


def open_splits(config: DataConfig) -> Mapping[str, Any]:
    """All splits of the source by name, read from disk on demand."""
    source = config.source
    if source.startswith("embedded:"):
        if source != "embedded:digits":
            raise UserError(f"data.source={source}: the embedded images are `embedded:digits`")
        return {"train": digits()}
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _open_folder(folder, config)
    _check_hub_id(source, folder)
    return _open_hub(config)


def pick_splits(config: DataConfig, splits: Mapping[str, Any]) -> tuple[Any, Any | None]:
    """The training split, and the validation split or None where one must be held out."""
    train = _split(splits, config.train_split, "data.train_split", config)
    if config.val_split is not None:
        return train, _split(splits, config.val_split, "data.val_split", config)
    train_name = config.train_split.split("[")[0]
    found = [name for name in _VAL_SPLITS if name in splits and name != train_name]
    return train, splits[found[0]] if found else None


def _split(splits: Mapping[str, Any], spec: str, key: str, config: DataConfig) -> Any:
    """A split by name, or a slice of one such as `train[:10%]`."""
    import datasets

    if config.streaming and "[" in spec:
        raise UserError(f"{key}={spec}: a stream has no slices; name a whole split, or set data.streaming=false")
    name = spec.split("[")[0]
    if name not in splits:
        raise UserError(f"{key}={spec}: {config.source} has no such split; there are {', '.join(splits)}")
    if config.streaming or name == spec:
        return splits[name]
    try:
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute({name: len(splits[name])})
    except (ValueError, AssertionError) as error:
        raise UserError(f"{key}={spec}: not a slice such as {name}[:10%] or {name}[100:200] ({error})") from error
    return splits[name].select(
        range(parts[0].from_ or 0, parts[0].to if parts[0].to is not None else len(splits[name]))
    )


def _open_folder(folder: Path, config: DataConfig) -> Mapping[str, Any]:
    import datasets

    streaming = {"streaming": True} if config.streaming else {}
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            loaded = datasets.load_from_disk(str(folder))
            return loaded if isinstance(loaded, Mapping) else {"train": loaded}
        kind = "parquet" if next(folder.rglob("*.parquet"), None) else "imagefolder"
        if kind == "imagefolder" and not _has_images(folder):
            raise UserError(
                f"data.source={config.source}: no images, no parquet files and no saved dataset in this folder; "
                "expected one folder for each class, perhaps inside train/ and val/"
            )
        return datasets.load_dataset(kind, data_dir=str(folder.resolve()), **streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"data.source={config.source}: cannot be read: {_first_line(error)}") from error


def _has_images(folder: Path) -> bool:
    return any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.rglob("*"))


def _check_hub_id(source: str, folder: Path) -> None:
    looks_like_path = source.startswith(("/", ".", "~")) or source.count("/") > 1 or folder.exists()
    if not looks_like_path:
        return
    hint = ""
    if folder.parent.is_dir():
        near = nearest(folder.name, [p.name for p in folder.parent.iterdir() if p.is_dir()])
        hint = f"; nearest: {folder.parent / near[0]}" if near else ""
    what = "is a file, a folder is needed" if folder.exists() else "there is no such folder"
    raise UserError(f"data.source={source}: {what}{hint}")


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
            raise UserError(f"{where}: gated on the hub; accept its terms there, then `hf auth login`") from error
        raise UserError(
            f"{where}: no such folder here and no such dataset on the hub (a private one needs `hf auth login`)"
        ) from error
    except GatedRepoError as error:
        raise UserError(f"{where}: gated on the hub; accept its terms there, then `hf auth login`") from error
    except (ConnectionError, FileNotFoundError) as error:
        if online:
            raise UserError(f"{where}: the hub did not answer: {_first_line(error)}; try again") from error
        raise UserError(
            f"{where}: no such folder here, and the hub cannot be reached; "
            "check the network, or name a folder of images or parquet files"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{where}: cannot be opened: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
