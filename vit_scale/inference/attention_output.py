"""Print and write the results of launch/attention.py."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vit_scale.attention_report.figures import similarity_figure, spectrum_figure, statistics_figure
from vit_scale.attention_report.measure import AttentionStatistics
from vit_scale.attention_report.pictures import (
    MAX_BLOCKS,
    heads_picture,
    overview_picture,
    side_by_side,
    spread_blocks,
)
from vit_scale.format import percent
from vit_scale.inference.attention_run import Looked, ViewedImage, Viewer
from vit_scale.record.terminal import make_console, make_table

OVERVIEW_BLOCKS = 6
"""Blocks of the picture of several images."""


def print_statistics(looked: Sequence[Looked], about: dict[str, str]) -> None:
    """Print what was measured, and a table per run with the mean over heads of each block."""
    console = make_console()
    rows = {**about, **_notes(looked)}
    width = max(map(len, rows))
    for name, value in rows.items():
        console.print(f"{name:<{width}}  {value}", soft_wrap=True)
    for each in looked:
        table = make_table("block", "distance", "entropy", "effective rank", "prefix tokens", "similarity of heads")
        for index, block in enumerate(each.statistics.blocks):
            others = block.similarity_to_others()
            cells = [_range(block.distance, 1), _range(block.entropy, 3)]
            cells += ["" if block.rank is None else _range(block.rank, 1), percent(block.prefix.mean().item(), 1)]
            table.add_row(str(index), *cells, "" if others is None else f"{others.mean().item():.2f}")
        console.print(f"\n{each.name}: {_size(each.statistics)}", style="bold", soft_wrap=True)
        console.print(table)


def _size(stats: AttentionStatistics) -> str:
    layout = stats.layout
    rows, columns = layout.grid
    return (
        f"{stats.images:,} images, {rows} x {columns} patches of {layout.patch[0]} x {layout.patch[1]} pixels, "
        f"{layout.prefix} prefix tokens; uniform attention has distance {stats.uniform_distance:.1f}"
    )


def _range(values: Tensor, digits: int) -> str:
    """Format the mean over heads, and the smallest and largest head."""
    low, mean, high = (f"{value:.{digits}f}" for value in (values.min(), values.mean(), values.max()))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def _notes(looked: Sequence[Looked]) -> dict[str, str]:
    notes = {"per block": "mean over heads (smallest to largest head); distance in pixels of the model's input"}
    skipped = [each.name for each in looked if not each.statistics.spectrum_images]
    if skipped:
        notes["effective rank"] = f"skipped for {', '.join(skipped)}: it would take minutes; --spectra 1 computes it"
    else:
        counts = ", ".join(f"{each.statistics.spectrum_images:,}" for each in looked)
        notes["effective rank"] = f"of {counts} images"
    return notes


def statistics_json(looked: Sequence[Looked], about: dict[str, str]) -> str:
    """Return all numbers except spectra as JSON."""
    runs = []
    for each in looked:
        stats = each.statistics
        table = stats.table()
        entry: dict[str, Any] = {"name": each.name, "model": each.loaded.config.model.name}
        entry |= {"weights": each.loaded.weights, "images": stats.images, "spectrum_images": stats.spectrum_images}
        entry |= {"prefix_tokens": stats.layout.prefix, "grid": stats.layout.grid, "patch_size": stats.layout.patch}
        entry["uniform_distance"] = stats.uniform_distance
        entry["heads"] = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        runs.append(entry)
    return json.dumps({**about, "runs": runs}, indent=1) + "\n"


def write_statistics(
    looked: Sequence[Looked], viewers: Sequence[Viewer], about: dict[str, str], folder: Path
) -> list[str]:
    """Write numbers, spectra, plots and a picture of some images; returns the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "statistics.json").write_text(statistics_json(looked, about))
    _write_csv(folder / "statistics.csv", looked)
    np.savez_compressed(folder / "spectra.npz", **_arrays(looked))  # type: ignore[arg-type]
    names = ["statistics.json", "statistics.csv", "spectra.npz"]
    runs = [(each.name, each.statistics) for each in looked]
    drawn = {"statistics": statistics_figure, "spectrum": spectrum_figure, "similarity": similarity_figure}
    for name, draw in drawn.items():
        figure = draw(runs)
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=110, facecolor="white")
            names.append(f"{name}.png")
    pictures = [_overview(each, viewer) for each, viewer in zip(looked, viewers, strict=True) if each.maps is not None]
    if pictures:
        side_by_side(pictures).save(folder / "examples.png")
        names.append("examples.png")
    return names


def _overview(each: Looked, viewer: Viewer) -> Any:
    assert each.maps is not None
    blocks = viewer.blocks or spread_blocks(viewer.depth, OVERVIEW_BLOCKS)
    return overview_picture(each.examples, each.maps, blocks=blocks, names=[""] * len(each.examples), title=each.name)


def _write_csv(path: Path, looked: Sequence[Looked]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        for number, each in enumerate(looked):
            table = each.statistics.table()
            if not number:
                writer.writerow(["run", *table.columns])
            writer.writerows([each.name, *row] for row in table.rows)


def _arrays(looked: Sequence[Looked]) -> dict[str, np.ndarray]:
    """Return spectra [heads, tokens] and similarities [heads, heads] by run and block."""
    found = {}
    for number, each in enumerate(looked):
        for index, block in enumerate(each.statistics.blocks):
            found[f"run{number}_block{index}_similarity"] = block.similarity.numpy()
            if block.spectrum is not None:
                found[f"run{number}_block{index}_singular_values"] = block.spectrum.numpy()
    return found


class ImageWriter:
    """Writes a picture and an `.npz` per image file to a directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: list[Path] = []

    def write(self, viewed: Sequence[tuple[Viewer, ViewedImage]]) -> None:
        """Write the maps of one image file, of one model or of several next to each other."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = viewed[0][1].path
        stem = self._free_stem(path.stem)
        pictures = []
        arrays: dict[str, Any] = {}
        for number, (viewer, image) in enumerate(viewed):
            blocks = viewer.blocks or spread_blocks(viewer.depth, MAX_BLOCKS)
            title = f"{path.name}, {viewer.name}"
            maps = image.maps
            pictures.append(heads_picture(image.pixels, maps, 0, blocks=blocks, heads=viewer.heads, title=title))
            prefix = f"run{number}_" if len(viewed) > 1 else ""
            every = viewer.blocks or range(viewer.depth)
            arrays |= {prefix + name: value for name, value in image.arrays(list(every), viewer.heads).items()}
        target = self.folder / f"{stem}-heads.png"
        side_by_side(pictures).save(target)
        np.savez_compressed(self.folder / f"{stem}-heads.npz", **arrays)  # type: ignore[arg-type]
        self.written.append(target)

    def _free_stem(self, stem: str) -> str:
        """Return an unused name: images of the same name from two directories must not overwrite each other."""
        return next(name for name in _numbered(stem) if self.folder / f"{name}-heads.png" not in self.written)


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1
