"""Which plots a page has, which values are listed instead, and the learning rate between logged steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vit_scale.page import old_runs
from vit_scale.page.curves import curve_figure, describe
from vit_scale.page.metrics import interpolate
from vit_scale.page.page import render_page
from vit_scale.page.panels import COLUMNS, Group, Panel, groups_with_data
from vit_scale.page.runs import PageRun, read_runs
from vit_scale.page.schedule import scheduled_rates
from vit_scale.schedule import LearningRate

MakeRun = Callable[..., Path]


def read(folder: Path) -> PageRun:
    return read_runs([folder])[0]


def lines_of(**curves: list[float | None]) -> list[dict]:
    keys = {name.replace("__", "/"): values for name, values in curves.items()}
    steps = range(len(next(iter(keys.values()))))
    return [{"step": 10 * (i + 1)} | {key: values[i] for key, values in keys.items()} for i in steps]


def test_values_that_never_change_are_listed_instead_of_plotted(make_run: MakeRun) -> None:
    lines = lines_of(
        train__weight_decay=[0.05, 0.05, 0.05],
        train__skipped_steps=[0.0, 0.0, 0.0],
        train__grad_norm=[1.0, 2.0, 3.0],
        memory__process_gb=[8.10, 8.11, 8.12],
        own__key=[7.0, 7.0, 7.0],
    )
    groups = groups_with_data([read(make_run(lines=lines))])
    assert [panel.title for group in groups.values() for panel in group.panels] == ["Gradient norm"]
    listed = {each.title: (each.values, each.unit) for group in groups.values() for each in group.constants}
    assert listed == {
        "Weight decay": ([(None, "0.05")], ""),
        "Process memory": ([(None, "8.12")], "GB"),
        "Skipped steps": ([(None, "0")], ""),
        "own/key": ([(None, "7")], ""),
    }


def test_constants_of_several_runs_are_listed_per_run(make_run: MakeRun) -> None:
    runs = read_runs(
        [make_run(name, lines=lines_of(train__weight_decay=[float(len(name))] * 2)) for name in ("a", "bb")]
    )
    [constant] = groups_with_data(runs)["Learning"].constants
    assert constant.values == [(0, "1"), (1, "2")]
    assert render_page(runs).count("<dt>Weight decay</dt>") == 1


def test_loss_and_first_metric_are_plotted_even_if_they_never_change(make_run: MakeRun) -> None:
    lines = lines_of(train__loss=[2.0, 2.0], val__top1=[0.1, 0.1], val__top5=[1.0, 1.0])
    [learning] = groups_with_data([read(make_run(lines=lines))]).values()
    assert [panel.title for panel in learning.panels] == ["Loss", "Top-1 accuracy"]
    assert [(each.title, each.values) for each in learning.constants] == [("Top-5 accuracy", [(None, "100.00%")])]


@pytest.mark.parametrize("values", [{"val__top5": [1.0]}, {"val__top5": [1.0, 1.0], "val_ema__top5": [1.0, 0.9]}])
def test_metrics_of_one_evaluation_or_of_different_weights_are_plotted(
    values: dict[str, list[float]], make_run: MakeRun
) -> None:
    [learning] = groups_with_data([read(make_run(lines=lines_of(**values)))]).values()
    assert [panel.title for panel in learning.panels] == ["Top-5 accuracy"]


def test_non_finite_values_are_counted_next_to_their_plot(make_run: MakeRun) -> None:
    lines = lines_of(train__loss=[2.0, None, None], train__grad_norm=[None, None, None])
    run = read(make_run(lines=lines))
    learning = groups_with_data([run])["Learning"]
    assert [panel.title for panel in learning.panels] == ["Loss"]
    assert [(each.title, each.values) for each in learning.constants] == [("Gradient norm", [(None, "not finite")])]
    assert "2 values not finite" in render_page([run])


def test_plots_are_described_for_readers_who_cannot_see_them(make_run: MakeRun) -> None:
    run = read(make_run(lines=lines_of(train__loss=[2.0, 1.0], val__loss=[None, None])))
    [panel] = groups_with_data([run])["Learning"].panels
    assert describe(panel, [run]) == "Loss: training from 2.0000 to 1.0000"
    assert 'role="img" aria-label="Loss: training from 2.0000 to 1.0000"' in render_page([run])


def test_metric_that_is_not_shown_has_no_plot(make_run: MakeRun) -> None:
    metrics = [each | {"shown": each["name"] != "top5"} for each in old_runs.TASK["metrics"]]
    lines = lines_of(val__top1=[0.1, 0.2], val__top5=[1.0, 1.0], val_ema__top5=[1.0, 1.0])
    run = read(make_run(lines=lines, summary={"task": {"name": "classify", "metrics": metrics}}))
    assert "op-5" not in render_page([run])
    assert "top5" not in render_page([run])


@pytest.mark.parametrize("wide", [0, 1, 2])
@pytest.mark.parametrize("narrow", range(9))
def test_rows_of_plots_are_full(wide: int, narrow: int) -> None:
    panels = [Panel("p", (), wide=True)] * wide + [Panel("p", ())] * narrow
    spans = Group(panels, []).spans()
    assert len(spans) == len(panels)
    used = 0
    for span in spans:
        assert used + span <= COLUMNS, "no plot is wrapped"
        used = (used + span) % COLUMNS
    assert used == 0


# ------------------------------------------------------------------------------------------------------ learning rate

RATE = LearningRate(peak=1e-3, final=0.0, steps=1000, warmup_steps=50)
SCHEDULE = {"steps": 1000, "warmup_steps": 50, "final_lr": 0.0}


def test_learning_rate_shows_warmup_that_was_not_logged(make_run: MakeRun) -> None:
    lines = [{"step": step, "epoch": step / 10, "train/lr": RATE.at(step - 1)} for step in (100, 500, 900)]
    run = read(make_run(lines=lines, schedule=SCHEDULE, optim={"lr": 1e-3}))
    [panel] = groups_with_data([run])["Learning"].panels
    [curve] = curve_figure(panel, [run])["series"]
    rates = dict(zip(curve["x"]["step"], curve["y"], strict=True))
    assert (min(rates), max(rates)) == (1, 900)
    assert rates[1] == pytest.approx(1e-3 / 50)
    assert max(rates.values()) == rates[50] == 1e-3
    assert curve["x"]["epoch"] == pytest.approx([step / 10 for step in rates])


def test_schedule_in_epochs_is_the_one_of_the_run(make_run: MakeRun) -> None:
    """1,438 images in batches of 32, as in recipes/digits.yaml."""
    rate = LearningRate(peak=1e-3, final=0.0, steps=1348, warmup_steps=90)
    lines = [{"step": s, "epoch": s * 32 / 1438, "train/lr": rate.at(s - 1)} for s in (100, 700, 1348)]
    options = {"epochs": 30, "steps": None, "warmup_epochs": 2, "final_lr": 0.0}
    run = read(make_run(lines=lines, schedule=options, optim={"lr": 1e-3}))
    assert scheduled_rates(run)[90] == 1e-3


def test_learning_rate_that_differs_from_the_options_is_drawn_as_logged(make_run: MakeRun) -> None:
    lines = [{"step": step, "train/lr": 2 * RATE.at(step - 1)} for step in (100, 500, 900)]
    run = read(make_run(lines=lines, schedule=SCHEDULE, optim={"lr": 1e-3}))
    assert scheduled_rates(run) == {}
    [panel] = groups_with_data([run])["Learning"].panels
    assert curve_figure(panel, [run])["series"][0]["x"]["step"] == [100, 500, 900]


def test_positions_between_logged_steps_are_interpolated() -> None:
    known = {10: 1.0, 20: 3.0}
    assert [interpolate(known, step) for step in (5, 10, 15, 21)] == [0.5, 1.0, 2.0, None]
