"""No failure to log or upload stops training, and each is said once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from vit_scale.recipe import build_config
from vit_scale.train import tracking
from vit_scale.train.tracking import Record


def record_in(folder: Path, said: list[str], *, step: int = 0) -> Record:
    config = build_config({"schedule": {"steps": 1}, "track": {"wandb": "disabled"}})
    return Record(folder, config, step=step, facts={}, say=said.append)


class BrokenRun:
    """A W&B run whose service has died."""

    id, offline, dir = "x", True, "."

    def __init__(self) -> None:
        self.asked = 0
        self.summary = SimpleNamespace(update=self.log)

    def log(self, *args: object, **options: object) -> None:
        self.asked += 1
        raise ConnectionError("the service is gone")


def test_broken_wandb_is_said_once_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, said = BrokenRun(), []  # type: tuple[BrokenRun, list[str]]
    monkeypatch.setattr(tracking, "start_wandb", lambda *args: broken)
    record = record_in(tmp_path, said)
    for step in (1, 2):
        record.log(step, {"train/loss": 1.0})
    assert record.close() is None
    assert broken.asked == 1
    assert len(said) == 1
    assert "the service is gone; training goes on" in said[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_files_that_cannot_be_written_are_said_once_each(tmp_path: Path) -> None:
    said: list[str] = []
    record = record_in(tmp_path, said)
    for name in ("metrics.jsonl", ".summary.json.partial"):
        (tmp_path / name).mkdir()
    for step in (1, 2):
        record.log(step, {"train/loss": 1.0})
        record.write_summary()
    assert sorted(line.split()[0] for line in said) == ["metrics.jsonl", "summary.json"]


def test_lines_after_the_checkpoint_are_dropped_and_half_lines_too(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "train/loss": 0.5}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 2, "train/lo')
    record_in(tmp_path, [], step=2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
