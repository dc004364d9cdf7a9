"""Run directories made by hand, one made by training, and a browser that opens pages."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vit_scale.page import old_runs
from vit_scale.page.page import write_page
from vit_scale.page.runs import read_runs
from vit_scale.recipe import build_config, to_yaml

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
IMAGES = ("batch", "mistakes", "attention")
MakeRun = Callable[..., Path]


def logged_lines(steps: int, height: float) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl: a noisy decreasing loss, and evaluations of raw and EMA weights."""
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        noise = 0.2 * math.sin(step * 12.9898)
        common = {"step": step, "epoch": step / 20}
        lines.append(
            common
            | {
                "train/loss": height * math.exp(-step / steps) + noise,
                "train/lr": 1e-3 * (1 - step / steps),
                "train/grad_norm": 3.0 + noise,
                "speed/images_per_second": 64.0,
                "speed/mfu": 0.2,
            }
        )
        if step % 10 == 0:
            top1 = step / steps * 0.9
            lines.append(common | {"val/loss": height, "val/top1": top1, "val_ema/loss": height, "val_ema/top1": top1})
    return lines


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run directory with these metrics, summary and options."""

    def make(
        name: str = "run",
        *,
        steps: int = 40,
        height: float = 2.0,
        lines: list[dict] | None = None,
        summary: dict | None = None,
        **options: dict,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        tree = {"schedule": {"steps": 40}, "batch": {"global": 32}} | options
        (folder / "config.yaml").write_text(to_yaml(build_config(tree)))
        (folder / "summary.json").write_text(json.dumps({"finished": True} | (summary or {})))
        lines = logged_lines(steps, height) if lines is None else lines
        if lines:
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make


@pytest.fixture
def add_results() -> Callable[[Path, list[str]], None]:
    """Add images and a confusion matrix to a run directory; each class is confused once with the next."""

    def add(folder: Path, classes: list[str]) -> None:
        _write_images(folder)
        described = {name: {"title": name.title(), "caption": "a caption", "step": 40} for name in IMAGES}
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"task": old_runs.TASK, "pictures": described}))
        table = {"name": "confusion", "title": "Confusion matrix", "columns": classes, "rows": _counts(classes)}
        (folder / "tables").mkdir()
        content = {"step": 40, "weights": "ema", "matrix": True} | table
        (folder / "tables" / "confusion.json").write_text(json.dumps(content))

    return add


@pytest.fixture
def add_old_results() -> Callable[[Path, list[str]], None]:
    """Add the same in the layout of earlier versions: confusion.json, images without titles, no task."""

    def add(folder: Path, classes: list[str]) -> None:
        _write_images(folder)
        record = {"step": 40, "weights": "ema", "classes": classes, "counts": _counts(classes)}
        (folder / "confusion.json").write_text(json.dumps(record))

    return add


def _write_images(folder: Path) -> None:
    (folder / "pictures").mkdir()
    for name in IMAGES:
        Image.new("RGB", (40, 30), "teal").save(folder / "pictures" / f"{name}.png")


def _counts(classes: list[str]) -> list[list[int]]:
    size = range(len(classes))
    return [[9 if i == j else int(j == i + 1) for j in size] for i in size]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """The directory of a run that was trained by launch/train.py."""
    folder = tmp_path_factory.mktemp("trained") / "debug"
    options = [f"run.dir={folder}", "track.wandb=disabled", "data.workers=0"]
    command = [sys.executable, "launch/train.py", "recipes/debug.yaml", *options]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=120)
    return folder


class Browser:
    """Headless Chromium that shows a page of runs."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver = driver
        self._folder = folder

    def open(self, *folders: Path) -> Browser:
        """Write the page of these runs and open it."""
        page = self._folder / "page.html"
        write_page(read_runs(folders), page)
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(page.as_uri())
        return self

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def traces(self, figure: str) -> list[dict[str, Any]]:
        """Return the curves of a plot as they are drawn now."""
        fields = "({key: c.key, run: c.run, color: c.color, x: c.x, y: c.y, visible: c.visible, faint: c.faint})"
        script = f"return document.querySelector(`[data-figure='${{arguments[0]}}']`).chart.drawn.map(c => {fields})"
        return self.run(script, figure)

    def hover(self, figure: str, x: float, y: float) -> str:
        """Move the mouse to a place of a chart, given as fractions of its size, and return the tooltip."""
        script = """
        const chart = document.querySelector(`[data-figure='${arguments[0]}']`), box = chart.getBoundingClientRect();
        const place = {clientX: box.left + arguments[1] * box.width, clientY: box.top + arguments[2] * box.height};
        chart.dispatchEvent(new PointerEvent("pointermove", place));
        return chart.querySelector(".tooltip").hidden ? "" : chart.querySelector(".tooltip").innerText;
        """
        return self.run(script, figure, x, y)

    def smooth(self, amount: float) -> None:
        """Move the slider."""
        self._change("smoothing", "input", str(amount))

    def axis(self, name: str) -> None:
        """Choose the horizontal axis."""
        self._change("axis", "change", name)

    def _change(self, element: str, event: str, value: str) -> None:
        script = "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        self.run(script + "e.dispatchEvent(new Event(arguments[2]));", element, value, event)

    def text(self) -> str:
        return self.run("return document.body.innerText")

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the URLs requested since `open`, except the page itself."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        assert any(url.endswith("/page.html") for url in urls), "the browser logs requests"
        return [url for url in urls if not url.startswith("data:") and not url.endswith("/page.html")]


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    if not CHROMIUM or not DRIVER:
        pytest.skip("no chromium and chromedriver are installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver: Any, tmp_path: Path) -> Browser:
    return Browser(driver, tmp_path)
