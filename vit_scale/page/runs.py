"""The runs that a page is about: finding their folders and reading what is in them."""

from __future__ import annotations

import base64
import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vit_scale.checkpoints.run_dir import has_run, read_summary
from vit_scale.config import with_current_names
from vit_scale.errors import UserError
from vit_scale.page.metrics import Metrics, read_metrics
from vit_scale.page.tables import Confusion, read_confusion
from vit_scale.recipe import load_recipe

# Readable on white and on black, and told apart by the colour-blind in this order.
COLORS = ("#3d7fe0", "#e6762f", "#25a17c", "#b65fd0", "#d8475f", "#94912c", "#1e9fb4", "#a2704c")
PICTURES = ("batch", "mistakes", "attention")


@dataclass(frozen=True)
class PageRun:
    """A run as the page shows it; whatever its folder lacks is empty."""

    name: str
    """The shortest end of the folder's path that no other run of the page has."""
    color: str
    folder: Path
    options: dict[str, Any]
    """`section.name` -> value."""
    summary: dict[str, Any]
    metrics: Metrics
    confusion: Confusion | None
    pictures: dict[str, str]
    """`batch`, `mistakes`, `attention` -> the picture as a data URL."""

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("finished"))


# ---------------------------------------------------------------------------------------------------------- finding


def find_folders(arguments: Sequence[str], overrides: Sequence[str] = ()) -> list[Path]:
    """The folder of each run, given as such, as its config.yaml, or as a recipe, which means its newest run.

    `overrides` are options that the recipe was trained with, such as `run.dir=...`. Raises `UserError`.
    """
    if overrides and not any(_is_recipe(Path(argument)) for argument in arguments):
        raise UserError(f"{overrides[0]}: options go with a recipe; a run's folder has its own")
    folders = [_folder_of(argument, overrides) for argument in arguments]
    return list({folder.resolve(): folder for folder in folders}.values())


def _folder_of(argument: str, overrides: Sequence[str]) -> Path:
    path = Path(argument)
    if _is_recipe(path):
        return newest_run(argument, overrides)
    folder = path.parent if path.is_file() and path.name == "config.yaml" else path
    if not has_run(folder):
        raise UserError(_no_run(path))
    # `.` is a run to the one who stands in it, but the commands of the page need its name.
    return folder if folder.name.strip(".") else folder.resolve()


def _is_recipe(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and not path.is_dir() and path.name != "config.yaml"


def newest_run(recipe: str, overrides: Sequence[str] = ()) -> Path:
    """The folder in which `recipe` was trained last; raises `UserError` where there is none."""
    config = load_recipe(recipe, overrides)
    stem = Path(recipe).stem
    numbered = [path for path in Path("runs").glob(f"{glob.escape(stem)}-*") if path.name[len(stem) + 1 :].isdigit()]
    candidates = [Path(config.run.dir)] if config.run.dir else [Path("runs", stem), *numbered]
    trained = [folder for folder in candidates if has_run(folder)]
    if not trained:
        where = config.run.dir or f"runs/{stem}"
        raise UserError(f"{recipe}: has no run in {where} yet.\nTrain it first: python launch/train.py {recipe}")
    return max(trained, key=lambda folder: (folder / "config.yaml").stat().st_mtime)


def _no_run(path: Path) -> str:
    if not path.exists():
        return f"{path}: there is no such run.{_list_runs(path.parent)}"
    return f"{path}: is not the folder of a run, which has a config.yaml.{_list_runs(path)}"


def _list_runs(folder: Path) -> str:
    runs = sorted(str(path.parent) for path in folder.glob("*/config.yaml"))
    more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
    return f"\nThere are {', '.join(runs[:5])}{more}." if runs else ""


# ---------------------------------------------------------------------------------------------------------- reading


def read_runs(folders: Sequence[Path]) -> list[PageRun]:
    """What each folder holds, under a name and a colour of its own."""
    names = distinct_names([folder.resolve() for folder in folders])
    return [_read_run(f, name, COLORS[i % len(COLORS)]) for i, (f, name) in enumerate(zip(folders, names, strict=True))]


def _read_run(folder: Path, name: str, color: str) -> PageRun:
    options = read_options(folder / "config.yaml")
    batch = options.get("batch.global")
    return PageRun(
        name=name,
        color=color,
        folder=folder,
        options=options,
        summary=_mapping(read_summary(folder)),
        metrics=read_metrics(folder / "metrics.jsonl", batch if isinstance(batch, int) else 1),
        confusion=read_confusion(folder / "confusion.json"),
        pictures={kind: url for kind in PICTURES if (url := _data_url(folder / "pictures" / f"{kind}.png"))},
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """For each path as many of its last parts as tell it from the others."""
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return ["/".join(folder.parts[-depth:]) for folder in folders]


def read_options(path: Path) -> dict[str, Any]:
    """`section.name` -> value, also of runs of other versions, whose options `load_recipe` would refuse."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    sections = {section: _mapping(options) for section, options in with_current_names(_mapping(tree)).items()}
    return {f"{section}.{name}": value for section, options in sections.items() for name, value in options.items()}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _data_url(path: Path) -> str | None:
    try:
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError:
        return None
