"""The page in a browser: plots show the logged values, and the controls work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vit_scale.page.metrics import MAX_POINTS
from vit_scale.sweep.plot import write_plot
from vit_scale.sweep.results import Result
from vit_scale.sweep.spec import load_sweep


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


def test_plots_and_constants_of_a_trained_run_have_every_logged_key(browser, trained: Path) -> None:
    text = browser.open(trained).text()
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    keys = {key for line in lines for key in line} - {"step", "epoch", "images"}
    figures = browser.run("return [...document.querySelectorAll('.chart')].map(p => p.dataset.figure)")
    drawn = {}
    for figure in [name for name in figures if not name.startswith("table")]:
        drawn |= {trace["key"]: trace for trace in browser.traces(figure)}
    titles = {
        "train/weight_decay": "Weight decay",
        "train/skipped_steps": "Skipped steps",
        "memory/process_gb": "Process memory",
        "val/top5": "Top-5 accuracy",
        "val_ema/top5": "Top-5 accuracy",
    }
    constants = keys - set(drawn)
    assert {"train/weight_decay", "train/skipped_steps"} <= constants <= set(titles)
    for key in constants:
        assert titles[key] in text
        values = logged(trained, key)[1]
        assert max(values) - min(values) <= 0.02 * max(values), "a value that changes has a plot"
    for key, trace in drawn.items():
        points = dict(zip(trace["x"], trace["y"], strict=True))
        for step, value in zip(*logged(trained, key), strict=True):
            assert points[step] == pytest.approx(value, rel=1e-6)
        assert key == "train/lr" or len(points) == len(logged(trained, key)[0])


def test_single_points_are_visible_with_their_value(browser, make_run) -> None:
    browser.open(make_run(lines=[{"step": 5, "train/loss": 2.5, "val/top1": 0.25}]))
    marks = """
    const circles = document.querySelectorAll(`[data-figure='${arguments[0]}'] .curve circle`);
    return [...circles].map(circle => circle.r.baseVal.value);
    """
    for figure in ("train/loss", "val/top1"):
        [radius] = browser.run(marks, figure)
        assert radius > 2
    labels = browser.run("return [...document.querySelectorAll('.curve text')].map(t => t.textContent)")
    assert labels == ["2.5000", "25.00%"]


def test_plots_start_at_step_0(browser, make_run) -> None:
    browser.open(make_run(lines=[{"step": step, "train/loss": 1 / step} for step in (100, 200, 300)]))
    ticks = browser.run("return [...document.querySelectorAll('.x-tick')].map(t => t.textContent)")
    assert ticks[0] == "0"


def test_values_are_shown_under_the_mouse_and_for_the_keyboard(browser, make_run) -> None:
    browser.open(make_run()).smooth(0)
    assert browser.hover("val/top1", 0.99, 0.5) == "step 40\nvalidation 90.00%\nvalidation, EMA 90.00%"
    press = """
    const chart = document.querySelector("[data-figure='val/top1']");
    for (const key of arguments[0]) chart.dispatchEvent(new KeyboardEvent("keydown", {key}));
    return chart.querySelector(".tooltip").innerText;
    """
    assert browser.run(press, ["Home", "ArrowRight"]).startswith("step 20\nvalidation 45.00%")


def test_dragging_zooms_and_double_click_resets(browser, make_run) -> None:
    browser.open(make_run())
    drag = """
    const chart = document.querySelector("[data-figure='train/lr']"), box = chart.getBoundingClientRect();
    const at = (f) => ({clientX: box.left + f * box.width, clientY: box.top + 50, pointerType: "mouse", pointerId: 1});
    chart.setPointerCapture = () => {};
    chart.dispatchEvent(new PointerEvent("pointerdown", at(0.4)));
    chart.dispatchEvent(new PointerEvent("pointermove", at(0.6)));
    chart.dispatchEvent(new PointerEvent("pointerup", at(0.6)));
    const zoomed = [...chart.chart.domain];
    chart.dispatchEvent(new MouseEvent("dblclick"));
    return [zoomed, chart.chart.domain];
    """
    zoomed, whole = browser.run(drag)
    assert whole == [0, 40]
    assert 0 < zoomed[0] < zoomed[1] < 40


def test_page_of_a_trained_run_has_model_result_versions_and_check(browser, trained: Path) -> None:
    text = browser.open(trained).text()
    summary = json.loads((trained / "summary.json").read_text())
    assert "classify: vit_mu on embedded:digits" in text
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
    assert (faint["faint"], smooth["faint"]) == (True, False)
    assert smooth["y"][0] == pytest.approx(raw["y"][0]), "the start is not biased towards zero"
    assert smooth["y"][1] == pytest.approx((0.9 * raw["y"][0] + raw["y"][1]) / 1.9)
    spread = [max(trace["y"][20:]) - min(trace["y"][20:]) for trace in (raw, smooth)]
    assert spread[1] < 0.5 * spread[0]


def test_schedules_and_evaluations_are_never_smoothed(browser, make_run) -> None:
    folder = make_run()
    browser.open(folder).smooth(0.9)
    for figure, keys in {"train/lr": ["train/lr"], "val/top1": ["val/top1", "val_ema/top1"]}.items():
        traces = browser.traces(figure)
        assert [trace["key"] for trace in traces] == keys
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
        title = browser.run("return document.querySelector(`[data-figure='train/lr'] .x-title`).textContent")
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
    const plots = [...document.querySelectorAll('.chart')];
    const colors = plots.flatMap(p => p.chart.drawn.map(c => [c.run, c.color]));
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


def test_many_option_differences_do_not_hide_the_plots(browser, make_run) -> None:
    many = dict.fromkeys(("lr", "adamw_lr", "weight_decay", "momentum", "clip_norm", "layer_decay", "eps"), 0.5)
    augment = dict.fromkeys(("hflip", "vflip", "erase", "mixup", "cutmix"), 0.5)
    browser.open(make_run("a", optim=many, augment=augment), make_run("b", optim={"lr": 0.2}))
    details = "document.querySelector('h2 + details')"
    assert browser.run(f"return {details}.open") is False
    assert browser.run(f"return {details}.innerText").startswith("11 of ")
    assert browser.run("return document.querySelector('.chart').getBoundingClientRect().top") < 700
    browser.run(f"{details}.open = true")
    assert "optim.momentum" in browser.run(f"return {details}.innerText")


def test_images_of_each_kind_start_a_row(browser, make_run, add_results) -> None:
    folders = [make_run(f"run-{i}") for i in range(4)]
    for folder in folders:
        add_results(folder, ["cat", "dog"])
    browser.open(*folders)
    figures = "[...document.querySelectorAll('.images figure')]"
    left = browser.run(f"return {figures}.map(f => [f.querySelector('b').innerText, f.offsetLeft])")
    kinds = [kind for kind, _ in left]
    first = [offset for i, (kind, offset) in enumerate(left) if i == 0 or kinds[i - 1] != kind]
    assert len(first) >= 2
    assert set(first) == {min(offset for _, offset in left)}


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
    counts = browser.run("return [...document.querySelectorAll('.matrix .count')].map(t => t.textContent)")
    assert counts == ["9", "1", "9", "1", "9"]
    assert browser.hover("table confusion of run 0", 0.5, 0.1) == "1 of 10 (10.0%)\ncat classified as dog"
    assert "cat\tdog\t1" in text
    assert "validation at step 40, EMA weights" in text


def test_old_layout_is_drawn_in_the_same_way(browser, make_run, add_old_results) -> None:
    folder = make_run()
    add_old_results(folder, ["cat", "dog"])
    text = browser.open(folder).text()
    counts = browser.run("return [...document.querySelectorAll('.matrix .count')].map(t => t.textContent)")
    assert counts == ["9", "1", "9"]
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
    ticks = browser.run("return [...document.querySelectorAll('.matrix .x-tick')].map(t => t.textContent)")
    assert ticks == ["</script><i…", "<b>dog</b>"]


def test_comparison_is_readable_on_a_phone(browser, make_run, add_results) -> None:
    folders = [make_run(f"a/run-{i}-with-quite-a-long-name", optim={"lr": 0.1 * (i + 1)}) for i in range(6)]
    add_results(folders[0], ["cat", "dog"])
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    outside = """
    return [...document.querySelectorAll('table.stack td, table.stack th, .chart, .stat')]
        .filter(e => e.offsetParent && e.getBoundingClientRect().right > 390).length
    """
    try:
        browser.open(*folders)
        assert browser.run("return document.documentElement.scrollWidth") == 390
        assert browser.run(outside) == 0
        label = "return getComputedStyle(document.querySelector('table.options td'), '::before').content"
        assert "run-0-with-quite-a-long-name" in browser.run(label)
        assert browser.run("return document.querySelector('.toolbar').offsetHeight") < 140
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_page_follows_the_dark_color_scheme(browser, make_run) -> None:
    browser.open(make_run())
    ask = "return ['body', '.x-tick', '.tooltip'].map(e => getComputedStyle(document.querySelector(e)))"
    ask += ".flatMap((s, i) => i === 1 ? [s.fill] : [s.backgroundColor, s.color])"
    light = browser.run(ask)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        assert all(a != b for a, b in zip(light, browser.run(ask), strict=True))
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", **dark})
        assert browser.run(ask)[2] == light[2], "paper is white"
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_sweep_page_shows_every_trial(browser, tmp_path: Path, root: Path) -> None:
    file = tmp_path / "sweep.yaml"
    parameters = {"optim.lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 0.1}}
    parameters["model.pool"] = {"values": ["mean", "cls"]}
    tree = {"program": "launch/train.py", "method": "random", "metric": {"name": "val/top1", "goal": "maximize"}}
    command = ["python", "launch/train.py", str(root / "recipes/digits.yaml"), "${args}"]
    file.write_text(json.dumps(tree | {"parameters": parameters, "command": command}))
    trials = [
        ("finished", 0.5, "cls"),
        ("stopped early", 0.2, "cls"),
        ("finished", 0.4, "mean"),
        ("failed", None, "cls"),
    ]
    results = [
        Result(number, state, value, {"optim.lr": 10.0 ** (number - 4), "model.pool": pool})
        for number, (state, value, pool) in enumerate(trials)
    ]
    write_plot(tmp_path / "page.html", results, load_sweep(file))
    browser.driver.get((tmp_path / "page.html").as_uri())
    circles = "return [...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.scatter circle').length)"
    assert browser.run(circles) == [3, 3, 3]
    ticks = "return [...document.querySelectorAll(`[data-figure='${arguments[0]}'] .x-tick`)].map(t => t.textContent)"
    assert browser.run(ticks, "optim.lr") == ["1e-4", "0.001", "0.01"]
    assert browser.run(ticks, "model.pool") == ["cls", "mean"]
    assert browser.hover("model.pool", 0.3, 0.7).startswith("val/top1 0.2000\ntrial 1, stopped early")
    assert "3\t–\t0.1\tcls\tfailed" in browser.text()


def test_narrow_logarithmic_axis_has_several_ticks(browser, tmp_path: Path, root: Path) -> None:
    results = [
        Result(i, "finished", 0.5, {"optim.lr": lr, "optim.weight_decay": 0.1}) for i, lr in enumerate((7e-4, 1.6e-3))
    ]
    write_plot(tmp_path / "page.html", results, load_sweep(root / "recipes/sweeps/lr.yaml"))
    browser.driver.get((tmp_path / "page.html").as_uri())
    ticks = browser.run(
        "return [...document.querySelectorAll(`[data-figure='optim.lr'] .x-tick`)].map(t => t.textContent)"
    )
    assert len(ticks) >= 2
