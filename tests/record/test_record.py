"""The record of a run: no failure to write, draw, log or upload stops training, and each is reported once."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vit_scale.config import Config
from vit_scale.errors import UserError
from vit_scale.recipe import build_config
from vit_scale.record import background, trackers
from vit_scale.record.background import TrackerThread
from vit_scale.record.record import Record, Start
from vit_scale.record.terminal import Terminal
from vit_scale.record.trackers import Tracker, check_trackers
from vit_scale.tasks.task import Table


def config_with(**track: Any) -> Config:
    return build_config({"schedule": {"steps": 1}, "track": {"wandb": "disabled", **track}})


def record_in(folder: Path, printed: list[str], *, step: int = 0, **track: Any) -> Record:
    terminal = Terminal(enabled=False)
    terminal.info = printed.append  # type: ignore[method-assign]
    return Record(folder, config_with(**track), start=Start(step), facts={}, terminal=terminal)


class Recorder(Tracker):
    """A tracker that keeps the methods called, and fails in some."""

    name = "recorder"

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.called: list[str] = []
        self.may_load, self.may_start = threading.Event(), threading.Event()
        self.may_load.set()
        self.may_start.set()

    def _call(self, method: str) -> None:
        self.called.append(method)
        if method in self.failing:
            raise ConnectionError("the service is gone")

    def load(self) -> None:
        self.may_load.wait()

    def start(self) -> None:
        self.may_start.wait()
        self._call("start")

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        self._call("log")

    def check(self, check: dict[str, Any]) -> None:
        self._call("check")

    def image(self, step: int, name: str, image: Image.Image) -> None:
        self._call("image")

    def finish(self) -> None:
        self._call("finish")


# ---------------------------------------------------------------------------------------------------------- trackers


def test_missing_client_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    printed: list[str] = []
    record = record_in(tmp_path, printed, wandb="offline")
    record.log(1, {"train/loss": 1.0})
    assert record.close() is None
    assert len(printed) == 1
    assert printed[0].startswith("W&B cannot be used")


@pytest.mark.parametrize("failing", ["start", "log"])
def test_failing_tracker_is_reported_once_and_no_longer_used(failing: str) -> None:
    printed: list[str] = []
    recorder = Recorder(failing)
    thread = TrackerThread(recorder, printed.append)
    for step in (1, 2):
        thread.send("log", step, {})
    thread.close()
    assert recorder.called == ["start", "log"][: 1 + (failing == "log")]
    assert printed == [
        "recorder cannot be used: the service is gone. Training continues; metrics.jsonl has everything."
    ]


def test_tracker_that_rejects_images_still_gets_metrics() -> None:
    printed: list[str] = []
    recorder = Recorder("image")
    thread = TrackerThread(recorder, printed.append)
    for _ in range(2):
        thread.send("image", 1, "mistakes", None)
        thread.send("log", 1, {})
    thread.close()
    assert recorder.called == ["start", "image", "log", "image", "log", "finish"]
    assert len(printed) == 1


def test_hanging_tracker_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "START_TIMEOUT_S", 0.01)
    monkeypatch.setattr(trackers, "SHUTDOWN_TIMEOUT_S", 0.01)
    printed: list[str] = []
    recorder = Recorder()
    recorder.may_start.clear()
    thread = TrackerThread(recorder, printed.append)
    thread.wait_for_start()
    thread.send("log", 1, {})
    thread.close()
    assert recorder.called == []
    assert len(printed) == 1
    assert "does not respond" in printed[0]
    recorder.may_start.set()


def test_slow_tracker_gets_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "START_TIMEOUT_S", 0.01)
    printed: list[str] = []
    recorder = Recorder()
    recorder.may_start.clear()
    thread = TrackerThread(recorder, printed.append)
    thread.wait_for_start()
    thread.send("log", 1, {})
    recorder.may_start.set()
    thread.close()
    assert recorder.called == ["start", "log", "finish"]
    assert printed == []


def test_tracker_far_behind_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_QUEUED_MESSAGES", 3)
    printed: list[str] = []
    recorder = Recorder()
    recorder.may_start.clear()
    thread = TrackerThread(recorder, printed.append)
    thread.start()
    for step in range(10):
        thread.send("log", step, {})
    assert len(printed) == 1
    recorder.may_start.set()


def test_waiting_for_the_start_starts_the_tracker() -> None:
    recorder = Recorder()
    thread = TrackerThread(recorder, print)
    thread.send("log", 1, {})
    assert not thread._thread.is_alive(), "no thread before the start"
    thread.wait_for_start()
    assert recorder.called[:1] == ["start"]
    thread.start()
    thread.close()
    assert recorder.called == ["start", "log", "finish"], "starting twice changes nothing"


@pytest.mark.parametrize("failing", ["load", "start"])
def test_failed_tracker_does_not_block(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("it is not there")

    monkeypatch.setattr(background, "START_TIMEOUT_S", 1e6)
    printed: list[str] = []
    recorder = Recorder()
    setattr(recorder, failing, fail)
    TrackerThread(recorder, printed.append).wait_for_start()
    assert printed == ["recorder cannot be used: it is not there. Training continues; metrics.jsonl has everything."]


def test_imports_are_waited_for_before_processes_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "START_TIMEOUT_S", 0.01)
    recorder = Recorder()
    recorder.may_load.clear()
    thread = TrackerThread(recorder, print)
    waiting = threading.Thread(target=thread.wait_for_start)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "waits for the import, however long it takes"
    recorder.may_load.set()
    waiting.join(60)
    assert not waiting.is_alive()
    thread.close()


@pytest.mark.parametrize(("step", "called"), [(0, ["check"]), (4, [])])
def test_trackers_of_a_new_run_get_the_timm_check_first(step: int, called: list[str], tmp_path: Path) -> None:
    recorder = Recorder()
    record = record_in(tmp_path, [], step=step)
    record._threads = [TrackerThread(recorder, print)]
    record.log(step + 1, {"train/loss": 1.0})
    assert recorder.called == []
    record.start_trackers({"equal": True})
    record.wait_for_trackers()
    assert recorder.called[:1] == ["start"]
    record.close()
    assert recorder.called == ["start", *called, "log", "finish"]
    assert json.loads((tmp_path / "summary.json").read_text())["timm_check"] == {"equal": True}


@pytest.mark.parametrize(
    ("name", "problem"),
    [("tensorbord", "unknown tracker 'tensorbord'"), ("mlflow", "not installed"), ("wandb", "track.wandb")],
)
def test_unknown_or_missing_tracker_is_a_user_error(name: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["tensorboard", "wandb"])
    with pytest.raises(UserError, match=problem) as error:
        check_trackers((name,))
    assert name == "wandb" or "installed: tensorboard" in str(error.value)


def test_trackers_are_a_list_on_the_command_line() -> None:
    config = build_config({"schedule": {"steps": 1}}, ["track.trackers=[tensorboard, mlflow]", "track.tags=[a]"])
    assert config.track.trackers == ("tensorboard", "mlflow")
    assert config.track.tags == ("a",)


def test_after_a_crash_messages_are_delivered_and_nothing_is_printed(tmp_path: Path) -> None:
    printed: list[str] = []
    recorder = Recorder()
    record = record_in(tmp_path, printed)
    record._threads = [TrackerThread(recorder, printed.append)]
    record.log(1, {"train/loss": 1.0})
    with pytest.raises(ZeroDivisionError), record:
        raise ZeroDivisionError
    assert recorder.called == ["start", "log"], "finish is not called"
    assert printed == []


def test_tensorboard_gets_each_step_once_over_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    printed: list[str] = []
    for start, steps in [(0, (1, 2, 3)), (2, (3, 4))]:
        record = record_in(tmp_path, printed, step=start, trackers=["tensorboard"])
        for step in steps:
            record.log(step, {"train/loss": 10.0 * step + start, "train/grad_norm": float("nan")})
        record.close()
    assert printed == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 10), (2, 20), (3, 32), (4, 42)]


# ------------------------------------------------------------------------------------------------------ local record


def test_each_unwritable_file_is_reported_once(tmp_path: Path) -> None:
    printed: list[str] = []
    record = record_in(tmp_path, printed)
    for name in (
        "metrics.jsonl",
        ".summary.json.partial",
        "tables/.confusion.json.partial",
        "pictures/.batch.png.partial",
    ):
        (tmp_path / name).mkdir(parents=True)
    for step in (1, 2):
        record.log(step, {"train/loss": 1.0})
        record.write_summary()
        record.table(1, Table("confusion", "Confusion matrix", ["a"], [[1]], matrix=True), "raw")
        record.image(1, "batch", lambda: Image.new("RGB", (2, 2)), title="", caption="")
    named = sorted(line.split()[0] for line in printed)
    assert named == ["metrics.jsonl", "pictures/batch.png", "summary.json", "tables/confusion.json"]


def test_failing_image_is_reported_once(tmp_path: Path) -> None:
    printed: list[str] = []
    record = record_in(tmp_path, printed)
    for _ in range(2):
        record.image(1, "mistakes", lambda: Image.fromarray(None), title="", caption="")  # type: ignore[arg-type]
    assert len(printed) == 1
    assert printed[0].startswith("pictures/mistakes.png cannot be written")
    assert not (tmp_path / "pictures/mistakes.png").exists()


def test_images_and_tables_are_files_of_the_run(tmp_path: Path) -> None:
    record = record_in(tmp_path, [])
    record.image(3, "attention", lambda: Image.new("RGB", (5, 4)), title="Attention", caption="of the last block")
    record.table(3, Table("confusion", "Confusion matrix", ["cat", "dog"], [[1, 2], [3, 4]], matrix=True), "ema")
    record.write_summary()
    with Image.open(tmp_path / "pictures/attention.png") as picture:
        assert picture.size == (5, 4)
    written = json.loads((tmp_path / "tables/confusion.json").read_text())
    assert written == {
        "step": 3, "weights": "ema", "name": "confusion", "title": "Confusion matrix", "columns": ["cat", "dog"],
        "rows": [[1, 2], [3, 4]], "matrix": True, "weakest": "", "percent": [],
    }  # fmt: skip
    pictures = json.loads((tmp_path / "summary.json").read_text())["pictures"]
    assert pictures == {"attention": {"title": "Attention", "caption": "of the last block", "step": 3}}
    assert sorted(path.name for path in tmp_path.rglob("*.partial")) == []


def test_lines_after_the_checkpoint_and_partial_lines_are_dropped(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "train/loss": 0.5}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 2, "train/lo')
    record_in(tmp_path, [], step=2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_last_logged_step_is_kept_over_many_launches(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 8)))
    for start in (4, 2, 0):
        assert record_in(tmp_path, [], step=start).summary["last_logged_step"] == 7
