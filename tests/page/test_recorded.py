"""Metrics, images and tables of any task: from the record of a run to the page; and runs of earlier versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vit_scale.page.headline import best_run, headline
from vit_scale.page.page import render_page
from vit_scale.page.panels import groups_with_data
from vit_scale.page.recorded import read_images, read_tables, read_task
from vit_scale.page.runs import PageRun, read_runs
from vit_scale.page.tables import MAX_ERRORS, MAX_ROWS, largest_errors, numeric_columns
from vit_scale.recipe import build_config
from vit_scale.record.record import Record, RecordShow, Start
from vit_scale.record.terminal import Terminal
from vit_scale.tasks.results import Metric, Table

DEPTH: dict[str, Any] = {
    "name": "depth",
    "metrics": [
        {"name": "rmse", "label": "RMSE", "higher": False, "percent": False, "brief": True, "title": "Depth RMSE"},
        {"name": "delta1", "label": "delta 1", "higher": True, "percent": True, "brief": True},
        {"name": "loss", "label": "loss", "higher": False, "percent": False, "brief": True},
    ],
    "facts": {"teacher": "timm/<b>big</b>"},
}
LINES = [
    {"step": 1, "train/loss": 3.0, "train/loss_scale": 1.0, "train/loss_shift": 2.0},
    {"step": 2, "val/rmse": 0.5, "val_ema/rmse": 0.75, "val/delta1": 0.5, "val/loss": 2.0},
    {"step": 4, "val/rmse": 0.25, "val_ema/rmse": 0.75, "val/delta1": 0.25, "val/loss": 1.0},
]


@pytest.fixture
def depth_run(make_run: Callable[..., Path]) -> Path:
    """A run of a task that this package does not have."""
    pictures = {"depth": {"title": "Depth maps", "caption": "fixed images", "step": 4}}
    folder = make_run("depth", lines=LINES, summary={"task": DEPTH, "pictures": pictures})
    (folder / "pictures").mkdir()
    Image.new("RGB", (40, 30), "teal").save(folder / "pictures" / "depth.png")
    rows = [[f"scene {i}", i, i / 100, i / 7] for i in range(25)]
    write_table(folder, "scenes", title="Scenes", columns=["name", "images", "delta_1", "rmse"], rows=rows)
    return folder


def write_table(folder: Path, name: str, **content: Any) -> None:
    (folder / "tables").mkdir(exist_ok=True)
    common = {"step": 4, "weights": "raw", "name": name, "title": name, "matrix": False, "percent": ["delta_1"]}
    (folder / "tables" / f"{name}.json").write_text(json.dumps(common | content))


def read(folder: Path) -> PageRun:
    return read_runs([folder])[0]


# ------------------------------------------------------------------------------------------------------ a made-up task


def test_record_of_a_made_up_task_is_what_the_page_reads(tmp_path: Path) -> None:
    """The same table and image, through the files of the run directory."""
    config = build_config({"schedule": {"steps": 1}, "track": {"wandb": "disabled"}})
    terminal = Terminal(enabled=False)
    scenes = Table("scenes", "Scenes", ["name", "delta_1"], [["Zürich", 0.5], ["sea", None]], percent=["delta_1"])
    with Record(tmp_path, config, start=Start(), facts={"task": DEPTH}, terminal=terminal) as record:
        show = RecordShow(record, None, 4, "ema")
        show.table(scenes)
        show.image("depth", lambda: Image.new("L", (9, 9)), title="Depth maps", caption="fixed images")
        record.close(finished=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    [table] = read_tables(tmp_path, summary)
    assert (table.table, table.step, table.weights) == (scenes, 4, "ema")
    [image] = read_images(tmp_path, summary)
    assert (image.name, image.title, image.caption) == ("depth", "Depth maps", "fixed images, step 4")
    assert read_task(summary).metrics[0] == Metric("rmse", "RMSE", higher=False, percent=False, title="Depth RMSE")


def test_headline_is_the_first_metric_and_lower_may_be_better(depth_run: Path) -> None:
    best = headline(read(depth_run))["best"]
    assert (best.label, best.value) == ("Depth RMSE", "0.2500")
    assert best.detail == "best, at step 4; last 0.2500 (raw), 0.7500 (EMA)"


def test_plots_are_those_of_the_metrics_and_parts_of_the_loss(depth_run: Path) -> None:
    panels = {panel.title: panel for panel in groups_with_data([read(depth_run)])["Learning"].panels}
    assert list(panels) == ["Loss", "Depth RMSE", "delta 1"]
    keys = ["train/loss", "train/loss_scale", "train/loss_shift", "val/loss", "val_ema/loss"]
    assert [curve.key for curve in panels["Loss"].curves] == keys
    assert len({(curve.style, curve.dash) for curve in panels["Loss"].curves}) == 5, "each has a distinct line"
    assert [curve.key for curve in panels["Depth RMSE"].curves] == ["val/rmse", "val_ema/rmse"]
    assert (panels["Depth RMSE"].format, panels["delta 1"].format) == ("fixed", "percent")


def test_page_of_a_made_up_task_has_its_images_tables_and_facts_as_text(depth_run: Path) -> None:
    page = render_page([read(depth_run)])
    body = page.split("<script>")[0]
    assert "Depth maps" in body
    assert "fixed images, step 4" in body
    assert '<th class="number">delta 1</th>' in body
    assert '<td class="number">19.0%</td>' in body
    assert "scene 19" in body
    assert "scene 20" not in body
    assert f"First {MAX_ROWS} of 25 rows." in body
    assert "timm/&lt;b&gt;big&lt;/b&gt;" in body
    assert "Top-1" not in body


def test_runs_of_two_tasks_share_a_page(depth_run: Path, make_run: Callable[..., Path]) -> None:
    runs = read_runs([depth_run, make_run("old"), make_run("worse", lines=[{"step": 1, "val/top1": 0.5}])])
    assert best_run(runs) == "Best Depth RMSE: 0.2500 (depth) · Best Top-1 accuracy: 90.00% (old)"
    titles = [panel.title for panel in groups_with_data(runs)["Learning"].panels]
    assert titles[:4] == ["Loss", "Depth RMSE", "delta 1", "Top-1 accuracy"]
    body = render_page(runs).split("<script>")[0]
    assert "<b>0.2500</b> Depth RMSE" in body
    assert "<b>90.00%</b> Top-1 accuracy" in body
    assert "depth: vit_" in body
    assert "classify: vit_" in body


def test_plots_have_distinct_ids_even_if_labels_collide(make_run: Callable[..., Path]) -> None:
    metrics = [{"name": name, "label": "Learning rate"} for name in ("a", "b")]
    lines = [{"step": i, "train/lr": float(i), "val/a": float(i), "val/b": float(i)} for i in (1, 2)]
    run = read(make_run(lines=lines, summary={"task": {"name": "odd", "metrics": metrics}}))
    panels = [panel for group in groups_with_data([run]).values() for panel in group.panels]
    assert [panel.title for panel in panels] == ["Learning rate"] * 3
    assert len({panel.id for panel in panels}) == 3


def test_skipped_steps_of_new_and_old_runs_share_a_plot(make_run: Callable[..., Path]) -> None:
    runs = read_runs(
        [
            make_run(key, lines=[{"step": i, f"train/{key}": float(i)} for i in (1, 2)])
            for key in ("skipped_steps", "bad_steps")
        ]
    )
    [panel] = groups_with_data(runs)["Performance"].panels
    assert panel.title == "Skipped steps"
    keys = {curve.key for curve in panel.curves}
    assert all(keys & run.metrics.curves.keys() for run in runs)


@pytest.mark.parametrize(
    "task", [{"name": "x"}, {"name": "x", "metrics": 3}, {"name": "x", "metrics": [3, {"label": "no name"}]}]
)
def test_task_without_valid_metrics_has_a_page_without_result(make_run: Callable[..., Path], task: dict) -> None:
    run = read(make_run(summary={"task": task}))
    assert "best" not in headline(run)
    assert best_run([run]) == ""
    assert render_page([run])


# -------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    "content",
    [
        {"columns": ["a", "b"], "rows": [[1]]},
        {"columns": 3, "rows": []},
        {"columns": ["a"], "rows": [3]},
        {"columns": ["a", "b"], "rows": [[1, 2]], "matrix": True},
        {"columns": ["a"], "rows": [["x"]], "matrix": True},
        {"columns": ["a"], "rows": [[-1]], "matrix": True},
        {"columns": ["a"], "rows": [], "step": None},
        {},
    ],
)
def test_malformed_table_is_skipped(make_run: Callable[..., Path], content: dict) -> None:
    folder = make_run(summary={"task": DEPTH})
    write_table(folder, "bad", **content)
    (folder / "tables" / "worse.json").write_text('{"step": 1, "ro')
    write_table(folder, "good", columns=["a"], rows=[[1]])
    assert [each.table.name for each in read(folder).tables] == ["good"]


def test_largest_errors_are_sorted_and_limited() -> None:
    table = Table("confusion", "", ["a", "b", "c"], [[5, 1, 0], [0, 5, 3], [2, 0, 5]], matrix=True)
    assert largest_errors(table).rows == [["b", "c", 3], ["c", "a", 2], ["a", "b", 1]]
    size = 10
    dense = Table("confusion", "", list("abcdefghij"), [[1] * size for _ in range(size)], matrix=True)
    assert len(largest_errors(dense).rows) == MAX_ERRORS


def test_numeric_columns_ignore_empty_cells() -> None:
    table = Table("t", "", ["name", "n", "x", "none"], [["a", 1, None, None], ["b", 2, 0.5, None]])
    assert numeric_columns(table) == [False, True, True, False]


# ------------------------------------------------------------------------------------------- runs of earlier versions


def test_old_run_is_shown_as_classification(
    make_run: Callable[..., Path], add_old_results: Callable[[Path, list[str]], None]
) -> None:
    folder = make_run()
    add_old_results(folder, ["cat", "dog"])
    run = read(folder)
    assert (run.task.name, run.task.metrics[0].heading) == ("classify", "Top-1 accuracy")
    assert [image.title for image in run.images] == ["Training batch", "Misclassified images", "Attention"]
    [table] = run.tables
    assert (table.table.title, table.table.matrix, table.step, table.weights) == ("Confusion matrix", True, 40, "ema")
    assert table.table.columns == ["cat", "dog"]
    assert table.table.rows == [[9, 1], [0, 9]]


@pytest.mark.parametrize(("classes", "shown"), [(0, True), (5, False), (6, True)])
def test_top5_of_an_old_run_with_up_to_five_classes_is_not_shown(classes: int, shown: bool) -> None:
    metrics = read_task({"class_names": [str(i) for i in range(classes)]}).metrics
    assert [metric.shown for metric in metrics] == [True, shown, True]


def test_pairs_of_an_old_run_are_a_sorted_table(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    record = {"step": 1, "weights": "raw", "classes": ["a", "b", "c"], "pairs": [[0, 2, 4], ["b", "a", 9]]}
    (folder / "confusion.json").write_text(json.dumps(record))
    [table] = read(folder).tables
    assert table.table.columns == ["true", "predicted", "images"]
    assert table.table.rows == [["b", "a", 9], ["a", "c", 4]]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"classes": ["a"]}',
        '{"step": 1, "weights": "raw", "classes": ["a"]',
        '{"step": 1, "weights": "raw", "classes": ["a"], "pairs": [[0, 7, 1]]}',
        '{"step": 1, "weights": "raw", "classes": ["a", "b"], "counts": [[1, 2, 3], [4, 5, 6]]}',
    ],
)
def test_malformed_confusion_of_an_old_run_is_skipped(make_run: Callable[..., Path], content: str) -> None:
    folder = make_run()
    (folder / "confusion.json").write_text(content)
    assert read(folder).tables == []


# -------------------------------------------------------------------------------------------------------------- images


def test_large_images_are_embedded_as_webp_and_small_ones_unchanged(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    (folder / "pictures").mkdir()
    Image.effect_noise((2000, 1000), 50).save(folder / "pictures" / "noise.png")
    Image.new("RGB", (40, 30), "teal").save(folder / "pictures" / "small.png")
    (folder / "pictures" / "broken.png").write_bytes(b"x" * 50_000)
    broken, noise, small = read_images(folder, {})
    assert noise.url.startswith("data:image/webp;base64,")
    assert len(noise.url) < (folder / "pictures" / "noise.png").stat().st_size
    assert (noise.width, small.width, broken.width) == (1600, 40, None)
    assert small.url.startswith("data:image/png;base64,")
    assert broken.url.startswith("data:image/png;base64,")
