"""The page in a browser: plots show the logged values, and the controls work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vit_scale.page.metrics import MAX_POINTS


@pytest.fixture(autouse=True)
def _no_errors_and_no_requests(browser):
    """Applies to every page that a test opens."""
    yield
    assert browser.errors() == []
    assert browser.requests() == []


def logged(folder: Path, key: str) -> tuple[list[int], list[float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points = {line["step"]: line[key] for line in lines if key in line}
    return list(points), list(points.values())


def test_plots_of_a_trained_run_have_every_logged_value(browser, trained: Path) -> None:
    browser.open(trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    keys = {key for line in lines for key in line} - {"step", "epoch", "images"}
    figures = browser.run("return [...document.querySelectorAll('.js-plotly-plot')].map(p => p.dataset.figure)")
    drawn = {}
    for figure in [name for name in figures if not name.startswith("table")]:
        drawn |= {trace["meta"]["key"]: trace for trace in browser.traces(figure)}
    assert set(drawn) == keys
    for key, trace in drawn.items():
        steps, values = logged(trained, key)
        assert trace["x"] == steps
        assert trace["y"] == pytest.approx(values, rel=1e-6)


def test_page_of_a_trained_run_has_model_result_versions_and_check(browser, trained: Path) -> None:
    text = browser.open(trained).text()
    summary = json.loads((trained / "summary.json").read_text())
    assert "vit_mu on embedded:digits" in text
    assert f"{100 * summary['best/val/top1']:.2f}%" in text
    assert "timm check passed" in text
    assert "Confusion matrix" in text
    assert "Misclassified images" in text
    assert f"torch {summary['versions']['torch']}" in text
    assert f"python launch/train.py {trained}/config.yaml run.dir={trained}-again" in text


def test_smoothing_draws_a_moving_average_over_the_logged_values(browser, make_run) -> None:
    folder = make_run()
    browser.open(folder).smooth(0)
    [raw] = browser.traces("train/grad_norm")
    browser.smooth(0.9)
    faint, smooth = browser.traces("train/grad_norm")
    assert faint["y"] == raw["y"]
    assert faint["opacity"] < 0.5
    assert smooth["y"][0] == pytest.approx(raw["y"][0]), "the start is not biased towards zero"
    assert smooth["y"][1] == pytest.approx((0.9 * raw["y"][0] + raw["y"][1]) / 1.9)
    spread = [max(trace["y"][20:]) - min(trace["y"][20:]) for trace in (raw, smooth)]
    assert spread[1] < 0.5 * spread[0]


def test_schedules_and_evaluations_are_never_smoothed(browser, make_run) -> None:
    folder = make_run()
    browser.open(folder).smooth(0.9)
    for figure, keys in {"train/lr": ["train/lr"], "val/top1": ["val/top1", "val_ema/top1"]}.items():
        traces = browser.traces(figure)
        assert [trace["meta"]["key"] for trace in traces] == keys
        assert traces[0]["y"] == pytest.approx(logged(folder, keys[0])[1], rel=1e-6)


def test_long_curves_are_smoothed_and_downsampled_when_the_page_opens(browser, make_run) -> None:
    text = browser.open(make_run(steps=5000)).text()
    faint, smooth = browser.traces("train/grad_norm")
    assert len(faint["y"]) == len(smooth["y"]) <= MAX_POINTS + 2
    assert f"more than {MAX_POINTS:,} points are downsampled" in text
    assert browser.run("return document.getElementById('smoothing').value") == "0.6"


def test_axis_switches_to_epochs_images_and_time(browser, make_run) -> None:
    browser.open(make_run())
    ends = {}
    for axis in ("step", "epoch", "images", "time"):
        browser.axis(axis)
        ends[axis] = browser.traces("train/lr")[0]["x"][-1]
        title = browser.run("return document.querySelector(`[data-figure='train/lr'] .xtitle`).textContent")
        assert title.startswith({"images": "images seen", "time": "training time (seconds)"}.get(axis, axis))
    assert ends == {"step": 40, "epoch": 2, "images": 1280, "time": 20}


def test_hiding_a_run_hides_it_everywhere_and_back(browser, make_run, add_results) -> None:
    folders = [make_run("a"), make_run("b", height=3.0)]
    for folder in folders:
        add_results(folder, ["cat", "dog"])
    browser.open(*folders).smooth(0)

    def shown() -> tuple[list[bool], int]:
        visible = [trace["visible"] for trace in browser.traces("train/grad_norm")]
        return visible, browser.run("return [...document.querySelectorAll('img')].filter(i => i.offsetParent).length")

    click = "document.querySelector('[data-toggle=\"1\"]').click()"
    assert shown() == ([True, True], 6)
    browser.run(click)
    assert shown() == ([True, False], 3)
    browser.run(click)
    assert shown() == ([True, True], 6)


def test_runs_have_the_same_color_in_every_plot_and_in_the_legend(browser, make_run) -> None:
    browser.open(make_run("a"), make_run("b"))
    script = """
    const plots = [...document.querySelectorAll('.js-plotly-plot')];
    const colors = plots.flatMap(p => p.data.map(t => [t.meta.run, t.line.color]));
    const swatch = i => document.querySelector(`[data-toggle="${i}"] .swatch`).style.getPropertyValue('--color').trim();
    return [...colors, [0, swatch(0)], [1, swatch(1)]];
    """
    colors = {tuple(pair) for pair in browser.run(script)}
    assert len(colors) == 2


def test_page_of_several_runs_shows_option_differences(browser, make_run) -> None:
    browser.open(make_run("a", optim={"lr": 0.1}), make_run("b", optim={"lr": 0.2}))
    rows = browser.run(
        "const h = [...document.querySelectorAll('h2')].find(h => h.textContent === 'Option differences');"
        "return [...h.parentElement.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    assert rows == [["optim.lr", "0.1", "0.2", "0.001"]]


def test_non_finite_values_are_gaps(browser, make_run) -> None:
    lines = [{"step": i, "train/loss": None if i == 3 else 1.0 / i} for i in range(1, 6)]
    browser.open(make_run(lines=lines)).smooth(0.5)
    assert [trace["y"][2] for trace in browser.traces("train/loss")] == [None, None]


def test_other_keys_are_plotted_under_more(browser, make_run) -> None:
    text = browser.open(make_run(lines=[{"step": 1, "own/<b>key</b>": 4.0}, {"step": 2, "own/<b>key</b>": 5.0}])).text()
    assert "own/<b>key</b>" in text
    assert browser.traces("own/<b>key</b>")[0]["y"] == [4, 5]


def test_run_without_metrics_has_a_page(browser, make_run) -> None:
    assert "Nothing has been logged yet." in browser.open(make_run(lines=[])).text()


def test_confusion_matrix_is_drawn_and_its_errors_are_listed(browser, make_run, add_results) -> None:
    folder = make_run()
    add_results(folder, ["cat", "dog", "eel"])
    text = browser.open(folder).text()
    heat = browser.run("return document.querySelector('.matrix').data[0]")
    assert heat["customdata"] == [[9, 1, 0], [0, 9, 1], [0, 0, 9]]
    assert "cat\tdog\t1" in text
    assert "validation at step 40, EMA weights" in text


def test_old_layout_is_drawn_in_the_same_way(browser, make_run, add_old_results) -> None:
    folder = make_run()
    add_old_results(folder, ["cat", "dog"])
    text = browser.open(folder).text()
    assert browser.run("return document.querySelector('.matrix').data[0]")["customdata"] == [[9, 1], [0, 9]]
    for title in ("Training batch", "Misclassified images", "Attention", "Confusion matrix"):
        assert title in text


def test_pairs_of_an_old_run_are_listed_without_a_matrix(browser, make_run) -> None:
    folder = make_run()
    classes = [f"class {i}" for i in range(300)]
    record = {"step": 40, "weights": "raw", "classes": classes, "pairs": [[7, 299, 12]]}
    (folder / "confusion.json").write_text(json.dumps(record))
    assert "class 7\tclass 299\t12" in browser.open(folder).text()
    assert browser.run("return document.querySelector('.matrix')") is None


def test_foreign_names_and_options_are_escaped(browser, make_run, add_results) -> None:
    evil = "</script><img src=x onerror=alert(1)><script>window.evil = 1</script>"
    folder = make_run("<i>run", track={"name": evil}, summary={"git_commit": evil, "versions": {evil: evil}})
    add_results(folder, [evil, "<b>dog</b>"])
    text = browser.open(folder).text()
    assert browser.run("return window.evil") is None
    assert browser.run("return document.querySelectorAll('img').length") == 3
    assert text.count(evil) >= 4
    assert browser.run("return document.querySelector('h1').textContent") == "<i>run"
    ticks = browser.run("return [...document.querySelectorAll('.matrix .xtick text')].map(t => t.textContent)")
    assert ticks == [evil, "<b>dog</b>"]


def test_page_fits_a_phone(browser, make_run, add_results) -> None:
    folders = [make_run("a"), make_run("b")]
    add_results(folders[0], ["cat", "dog"])
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        browser.open(*folders)
        assert browser.run("return document.documentElement.scrollWidth") == 390
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_page_follows_the_dark_color_scheme(browser, make_run) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(make_run())
    ask = "return [getComputedStyle(document.body).backgroundColor, document.querySelector('.plot').layout.font.color]"
    light = browser.run(ask)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        both_change = lambda _: all(a != b for a, b in zip(light, browser.run(ask), strict=True))  # noqa: E731
        assert WebDriverWait(browser.driver, 10).until(both_change)
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
