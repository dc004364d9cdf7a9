"""The record of a run: no failure to write, draw, log or upload stops training, and each is said once."""

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
from vit_scale.record import trackers
from vit_scale.record.record import Record
from vit_scale.record.trackers import Teller, Tracker, check_trackers
from vit_scale.tasks.classify.confusion import ConfusionTable


def config_with(**track: Any) -> Config:
    return build_config({"schedule": {"steps": 1}, "track": {"wandb": "disabled", **track}})


def record_in(folder: Path, said: list[str], *, step: int = 0, **track: Any) -> Record:
    return Record(folder, config_with(**track), step=step, facts={}, say=said.append)


class Listener(Tracker):
    """A tracker that remembers what it was told, and fails where it should."""

    name = "listener"

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.heard: list[str] = []
        self.may_load, self.may_start = threading.Event(), threading.Event()
        self.may_load.set()
        self.may_start.set()

    def _hear(self, method: str) -> None:
        self.heard.append(method)
        if method in self.failing:
            raise ConnectionError("the service is gone")

    def load(self) -> None:
        self.may_load.wait()

    def start(self) -> None:
        self.may_start.wait()
        self._hear("start")

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        self._hear("log")

    def check(self, check: dict[str, Any]) -> None:
        self._hear("check")

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        self._hear("picture")

    def finish(self) -> None:
        self._hear("finish")


# ---------------------------------------------------------------------------------------------------------- trackers


def test_a_client_that_cannot_be_imported_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    record = record_in(tmp_path, said, wandb="offline")
    record.log(1, {"train/loss": 1.0})
    assert record.close() is None
    assert len(said) == 1
    assert said[0].startswith("W&B cannot be used")


@pytest.mark.parametrize("failing", ["start", "log"])
def test_a_broken_tracker_is_said_once_and_left_alone(failing: str) -> None:
    said: list[str] = []
    listener = Listener(failing)
    teller = Teller(listener, said.append)
    for step in (1, 2):
        teller.tell("log", step, {})
    teller.close()
    assert listener.heard == ["start", "log"][: 1 + (failing == "log")]
    assert said == ["listener cannot be used: the service is gone. Training goes on; metrics.jsonl has everything."]


def test_a_tracker_that_takes_no_pictures_still_gets_the_numbers() -> None:
    said: list[str] = []
    listener = Listener("picture")
    teller = Teller(listener, said.append)
    for _ in range(2):
        teller.tell("picture", 1, "mistakes", None)
        teller.tell("log", 1, {})
    teller.close()
    assert listener.heard == ["start", "picture", "log", "picture", "log", "finish"]
    assert len(said) == 1


def test_nobody_waits_for_a_tracker_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "SECONDS_TO_START", 0.01)
    monkeypatch.setattr(trackers, "SECONDS_TO_END", 0.01)
    said: list[str] = []
    listener = Listener()
    listener.may_start.clear()
    teller = Teller(listener, said.append)
    teller.wait_for_start()
    teller.tell("log", 1, {})
    teller.close()
    assert listener.heard == []
    assert len(said) == 1
    assert "does not answer" in said[0]
    listener.may_start.set()


def test_a_late_tracker_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "SECONDS_TO_START", 0.01)
    said: list[str] = []
    listener = Listener()
    listener.may_start.clear()
    teller = Teller(listener, said.append)
    teller.wait_for_start()
    teller.tell("log", 1, {})
    listener.may_start.set()
    teller.close()
    assert listener.heard == ["start", "log", "finish"]
    assert said == []


def test_a_tracker_far_behind_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    said: list[str] = []
    listener = Listener()
    listener.may_start.clear()
    teller = Teller(listener, said.append)
    teller.start()
    for step in range(10):
        teller.tell("log", step, {})
    assert len(said) == 1
    listener.may_start.set()


def test_whoever_waits_for_the_start_finds_it_begun_and_done() -> None:
    listener = Listener()
    teller = Teller(listener, print)
    teller.tell("log", 1, {})
    assert not teller._thread.is_alive(), "a tracker that nobody has let begin has no thread"
    teller.wait_for_start()
    assert listener.heard[:1] == ["start"]
    teller.start()
    teller.close()
    assert listener.heard == ["start", "log", "finish"], "to let it begin again changes nothing"


@pytest.mark.parametrize("failing", ["load", "start"])
def test_nobody_waits_for_a_tracker_that_has_failed(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("it is not there")

    monkeypatch.setattr(trackers, "SECONDS_TO_START", 1e6)
    said: list[str] = []
    listener = Listener()
    setattr(listener, failing, fail)
    Teller(listener, said.append).wait_for_start()
    assert said == ["listener cannot be used: it is not there. Training goes on; metrics.jsonl has everything."]


def test_no_process_is_forked_while_a_tracker_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "SECONDS_TO_START", 0.01)
    listener = Listener()
    listener.may_load.clear()
    teller = Teller(listener, print)
    waiting = threading.Thread(target=teller.wait_for_start)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "an import is waited for, however long it takes"
    listener.may_load.set()
    waiting.join(60)
    assert not waiting.is_alive()
    teller.close()


@pytest.mark.parametrize(("step", "heard"), [(0, ["check"]), (4, [])])
def test_trackers_of_a_new_run_hear_of_the_check_before_what_was_told_earlier(
    step: int, heard: list[str], tmp_path: Path
) -> None:
    listener = Listener()
    record = record_in(tmp_path, [], step=step)
    record._tellers = [Teller(listener, print)]
    record.log(step + 1, {"train/loss": 1.0})
    assert listener.heard == []
    record.start_trackers({"equal": True})
    record.wait_for_trackers()
    assert listener.heard[:1] == ["start"]
    record.close()
    assert listener.heard == ["start", *heard, "log", "finish"]
    assert json.loads((tmp_path / "summary.json").read_text())["timm_check"] == {"equal": True}


@pytest.mark.parametrize(
    ("name", "problem"),
    [("tensorbord", "there is no 'tensorbord'"), ("mlflow", "not installed"), ("wandb", "track.wandb")],
)
def test_a_tracker_that_is_not_there_is_the_users_mistake(
    name: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["tensorboard", "wandb"])
    with pytest.raises(UserError, match=problem) as error:
        check_trackers((name,))
    assert name == "wandb" or "here there are: tensorboard" in str(error.value)


def test_trackers_are_a_list_on_the_command_line() -> None:
    config = build_config({"schedule": {"steps": 1}}, ["track.trackers=[tensorboard, mlflow]", "track.tags=[a]"])
    assert config.track.trackers == ("tensorboard", "mlflow")
    assert config.track.tags == ("a",)


def test_a_crash_leaves_what_was_told_and_nothing_is_said_after_it(tmp_path: Path) -> None:
    said: list[str] = []
    listener = Listener()
    record = record_in(tmp_path, said)
    record._tellers = [Teller(listener, said.append)]
    record.log(1, {"train/loss": 1.0})
    with pytest.raises(ZeroDivisionError), record:
        raise ZeroDivisionError
    assert listener.heard == ["start", "log"], "the tracker is not told that all went well"
    assert said == []


def test_tensorboard_is_told_the_same_and_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    for start, steps in [(0, (1, 2, 3)), (2, (3, 4))]:
        record = record_in(tmp_path, said, step=start, trackers=["tensorboard"])
        for step in steps:
            record.log(step, {"train/loss": 10.0 * step + start, "train/grad_norm": float("nan")})
        record.close()
    assert said == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 10), (2, 20), (3, 32), (4, 42)]


# ------------------------------------------------------------------------------------------------------ local record


def test_files_that_cannot_be_written_are_said_once_each(tmp_path: Path) -> None:
    said: list[str] = []
    record = record_in(tmp_path, said)
    for name in ("metrics.jsonl", ".summary.json.partial", ".confusion.json.partial", "pictures/.batch.png.partial"):
        (tmp_path / name).mkdir(parents=True)
    for step in (1, 2):
        record.log(step, {"train/loss": 1.0})
        record.write_summary()
        record.confusion(ConfusionTable(1, "raw", ["a"], [[1]], []))
        record.picture(1, "batch", lambda: Image.new("RGB", (2, 2)))
    named = sorted(line.split()[0] for line in said)
    assert named == ["confusion.json", "metrics.jsonl", "pictures/batch.png", "summary.json"]


def test_a_picture_that_cannot_be_drawn_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    record = record_in(tmp_path, said)
    for _ in range(2):
        record.picture(1, "mistakes", lambda: Image.fromarray(None))  # type: ignore[arg-type]
    assert len(said) == 1
    assert said[0].startswith("pictures/mistakes.png cannot be written")
    assert not (tmp_path / "pictures/mistakes.png").exists()


def test_pictures_and_confusions_are_files_of_the_run(tmp_path: Path) -> None:
    record = record_in(tmp_path, [])
    record.picture(3, "attention", lambda: Image.new("RGB", (5, 4)))
    record.confusion(ConfusionTable(3, "ema", ["cat", "dog"], [[1, 2], [3, 4]], [(1, 0, 3), (0, 1, 2)]))
    with Image.open(tmp_path / "pictures/attention.png") as picture:
        assert picture.size == (5, 4)
    written = json.loads((tmp_path / "confusion.json").read_text())
    assert written == {"step": 3, "weights": "ema", "classes": ["cat", "dog"], "counts": [[1, 2], [3, 4]]}
    assert sorted(path.name for path in tmp_path.rglob("*.partial")) == []


def test_lines_after_the_checkpoint_are_dropped_and_half_lines_too(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "train/loss": 0.5}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 2, "train/lo')
    record_in(tmp_path, [], step=2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_the_highest_step_that_was_told_is_remembered_over_many_starts(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 8)))
    for start in (4, 2, 0):
        assert record_in(tmp_path, [], step=start).summary["told_step"] == 7
