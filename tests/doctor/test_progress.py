"""Nothing is silent for more than a few seconds, in a terminal and in a pipe."""

from __future__ import annotations

import time

import pytest

from vit_scale.doctor.isolation import Probe
from vit_scale.doctor.progress import SILENT_SECONDS, Progress


def test_long_check_prints_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress() as progress:
        now += 4.5
        progress.tick()
        progress.expect(2)
        progress.start(Probe("imports", "versions", "x:y"))
        progress.stage("importing torch")
        for _ in range(100):
            now += 0.1
            progress.tick()
        progress.start(Probe("cpu", "devices", "x:y"))
    captured = capsys.readouterr()
    assert captured.out == "", "the table is alone on stdout"
    assert captured.err.splitlines() == [
        "looking for GPUs",
        "looking for GPUs (4 s)",
        "1/2  versions: imports",
        "1/2  versions: imports, importing torch (4 s)",
        "1/2  versions: imports, importing torch (8 s)",
        "2/2  devices: cpu",
    ]
    assert SILENT_SECONDS < 5


def test_terminal_shows_one_live_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Progress() as progress:
        progress.expect(1)
        progress.start(Probe("imports", "versions", "x:y"))
        progress.stage("importing torch")
    assert "1/1  versions: imports" in capsys.readouterr().err
