"""The runs of a page: finding and reading their directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vit_scale.charts.figures import COLORS
from vit_scale.checkpoints.run_dir import has_run, read_summary, runs_of
from vit_scale.cli import command_line
from vit_scale.config import with_current_names
from vit_scale.errors import UserError
from vit_scale.page.metrics import Metrics, read_metrics
from vit_scale.page.recorded import PageImage, PageTable, PageTask, as_mapping, read_images, read_tables, read_task
from vit_scale.recipe import load_recipe


@dataclass(frozen=True)
class PageRun:
    """A run as the page shows it; whatever its directory lacks is empty."""

    name: str
    """The shortest end of the directory's path that no other run of the page has."""
    color: str
    folder: Path
    options: dict[str, Any]
    """`section.name` -> value."""
    summary: dict[str, Any]
    metrics: Metrics
    task: PageTask
    images: list[PageImage]
    tables: list[PageTable]

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("finished"))


# ---------------------------------------------------------------------------------------------------------- finding


def find_folders(arguments: Sequence[str], overrides: Sequence[str] = ()) -> list[Path]:
    """Return the directory of each run, given as such, as its config.yaml, or as a recipe, which means its latest run.

    `overrides` are options that the recipe was trained with, such as `run.dir=...`. Raises `UserError`.
    """
    if overrides and not any(_is_recipe(Path(argument)) for argument in arguments):
        raise UserError(f"{overrides[0]}: options require a recipe; a run directory has its own")
    folders = [_folder_of(argument, overrides) for argument in arguments]
    return list({folder.resolve(): folder for folder in folders}.values())


def _folder_of(argument: str, overrides: Sequence[str]) -> Path:
    path = Path(argument)
    if _is_recipe(path):
        return latest_run(argument, overrides)
    folder = path.parent if path.is_file() and path.name == "config.yaml" else path
    if not has_run(folder):
        raise UserError(_no_run(path))
    # The commands of the page need the name of `.`.
    return folder if folder.name.strip(".") else folder.resolve()


def _is_recipe(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and not path.is_dir() and path.name != "config.yaml"


def latest_run(recipe: str, overrides: Sequence[str] = ()) -> Path:
    """Return the directory in which `recipe` was trained last; raises `UserError` if there is none."""
    config = load_recipe(recipe, overrides)
    trained = [Path(config.run.dir)] if config.run.dir else runs_of(recipe)
    if not trained or not has_run(trained[0]):
        where = config.run.dir or f"runs/{Path(recipe).stem}"
        train = command_line("train", recipe)
        raise UserError(f"{recipe}: no run in {where} yet.\nTrain it first: {train}")
    return trained[0]


def _no_run(path: Path) -> str:
    if not path.exists():
        return f"{path}: run not found.{_list_runs(path.parent)}"
    return f"{path}: not a run directory: no config.yaml.{_list_runs(path)}"


def _list_runs(folder: Path) -> str:
    runs = sorted(str(path.parent) for path in folder.glob("*/config.yaml"))
    more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
    return f"\nRuns: {', '.join(runs[:5])}{more}." if runs else ""


# ---------------------------------------------------------------------------------------------------------- reading


def read_runs(folders: Sequence[Path]) -> list[PageRun]:
    """Read each run directory, and give each run a name and a color."""
    names = distinct_names([folder.resolve() for folder in folders])
    return [_read_run(f, name, COLORS[i % len(COLORS)]) for i, (f, name) in enumerate(zip(folders, names, strict=True))]


def _read_run(folder: Path, name: str, color: str) -> PageRun:
    options = read_options(folder / "config.yaml")
    batch = options.get("batch.global")
    summary = as_mapping(read_summary(folder))
    return PageRun(
        name=name,
        color=color,
        folder=folder,
        options=options,
        summary=summary,
        metrics=read_metrics(folder / "metrics.jsonl", batch if isinstance(batch, int) else 1),
        task=read_task(summary),
        images=read_images(folder, summary),
        tables=read_tables(folder, summary),
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return as many of the last parts of each path as distinguish it from the others."""
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return ["/".join(folder.parts[-depth:]) for folder in folders]


def read_options(path: Path) -> dict[str, Any]:
    """Return `section.name` -> value, also for runs of other versions, whose options `load_recipe` would reject."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    sections = {section: as_mapping(options) for section, options in with_current_names(as_mapping(tree)).items()}
    return {f"{section}.{name}": value for section, options in sections.items() for name, value in options.items()}
