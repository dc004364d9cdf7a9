"""The section "Where it looks": what it plots of which runs, and runs without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vit_scale.page.attention import block_figures
from vit_scale.page.page import render_page
from vit_scale.page.panels import LOOKS, groups_with_data
from vit_scale.page.runs import read_runs

MakeRun = Callable[..., Path]
COLUMNS = ["block", "head", "distance", "entropy", "prefix_share", "similarity", "effective_rank"]


def add_table(folder: Path, rows: list[list], columns: list[str] = COLUMNS) -> Path:
    (folder / "tables").mkdir()
    table = {"name": "attention_statistics", "title": "Attention", "columns": columns, "rows": rows}
    summary = json.loads((folder / "summary.json").read_text()) | {"task": {"name": "mae", "metrics": []}}
    (folder / "summary.json").write_text(json.dumps(summary))
    text = json.dumps({"step": 40, "weights": "raw"} | table)
    (folder / "tables" / "attention_statistics.json").write_text(text)
    return folder


def test_each_statistic_has_a_point_per_head_and_a_line_of_means(make_run: MakeRun) -> None:
    rows = [[0, 0, 2.0, 0.5, 0.0, None, 3.0], [0, 1, 4.0, 0.7, 0.0, None, 5.0], [1, 0, 8.0, 0.9, 0.0, None, None]]
    figures = block_figures(read_runs([add_table(make_run(), rows)]))
    assert [plot.column for plot in figures] == ["distance", "entropy", "effective_rank"], "others are empty or zero"
    distance = next(iter(figures.values()))
    heads, means = distance["series"]
    assert (heads["x"]["block"], heads["y"]) == ([0.0, 0.0, 1.0], [2.0, 4.0, 8.0])
    assert (means["x"]["block"], means["y"]) == ([0.0, 1.0], [3.0, 8.0])
    assert heads["texts"][1] == ["block 0, head 1", "4"]


def test_runs_are_side_by_side_and_the_table_is_not_listed_again(make_run: MakeRun) -> None:
    rows = [[0, 0, 2.0, 0.5, 0.1, 1.0, 3.0]]
    runs = read_runs([add_table(make_run(name), rows) for name in ("a", "b")] + [make_run("without")])
    figure = next(iter(block_figures(runs).values()))
    assert [(each["run"], each["color"]) for each in figure["series"]] == [
        (number, runs[number].color) for number in (0, 0, 1, 1)
    ]
    page = render_page(runs)
    assert page.count(f"<h2>{LOOKS}</h2>") == 1
    assert "Images and tables" not in page


@pytest.mark.parametrize("columns", [["block", "distance"], [*COLUMNS[:-1], "rank"]])
def test_table_of_another_version_is_shown_as_far_as_it_goes(make_run: MakeRun, columns: list[str]) -> None:
    run = add_table(make_run(), [[0, 0, 2.0, 0.5, 0.1, 1.0, 3.0][: len(columns)]], columns)
    assert len(block_figures(read_runs([run]))) == (0 if len(columns) == 2 else 4)
    assert render_page(read_runs([run]))


def test_curves_are_those_of_the_first_the_middle_and_the_last_block(make_run: MakeRun) -> None:
    keys = [f"val/attention_{name}_block{i}" for name in ("distance", "entropy") for i in range(12)]
    run = make_run(lines=[{"step": step} | dict.fromkeys(keys, 1.0) for step in (10, 20)])
    groups = groups_with_data(read_runs([run]))
    assert list(groups) == [LOOKS], "no block is left for the group of other keys"
    distance, entropy = groups[LOOKS].panels
    assert [curve.key for curve in distance.curves[:3]] == [f"val/attention_distance_block{i}" for i in (0, 6, 11)]
    assert len({curve.dash for curve in entropy.curves[:3]}) == 3


def test_page_of_a_run_without_attention_has_no_such_section(make_run: MakeRun) -> None:
    assert LOOKS not in render_page(read_runs([make_run()]))
