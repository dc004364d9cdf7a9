"""The whole doctor once, as a user runs it, in its quick form."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from vit_scale.commands.doctor import main
from vit_scale.doctor.check import GROUPS
from vit_scale.doctor.run import all_probes

KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def examined(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess, Any, Path]:
    """What it prints, its report, and the directories it may write to."""
    top = tmp_path_factory.mktemp("doctor")
    for name in ("tmp", "runs"):
        (top / name).mkdir()
    command = [sys.executable, "launch/doctor.py", "--quick", "--dir", str(top / "runs"), "--json", str(top / "x.json")]
    # Some CPUs that advertise AMX crash in a bf16 matmul.
    environment = os.environ | {"TMPDIR": str(top / "tmp"), "WANDB_API_KEY": KEY, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert (top / "x.json").exists(), done.stdout + done.stderr
    return done, json.loads((top / "x.json").read_text()), top


def test_training_can_be_trusted_here(examined: tuple) -> None:
    done, report, _ = examined
    broken = [check for check in report["checks"] if check["status"] == "broken" and check["required"]]
    assert broken == []
    assert done.returncode == 0
    assert report["trusted"]
    assert "Training can be trusted here" in done.stdout


def test_every_check_has_a_row_and_a_result(examined: tuple) -> None:
    done, report, _ = examined
    found = {check["name"]: check for check in report["checks"]}
    probes = [probe.name for probe in all_probes(report["gpus"], quick=True) if probe.name not in ("gpu", "matmul")]
    assert set(probes) <= found.keys()
    for name in probes:
        assert any(line.startswith(f"{name} ") for line in done.stdout.splitlines()), name
        assert found[name]["status"] in ("works", "slow", "skipped", "broken")
        assert found[name]["value"], name


def test_processes_agree_and_runs_resume(examined: tuple) -> None:
    _, report, _ = examined
    found = {check["name"]: check for check in report["checks"]}
    assert found["sharding"]["status"] in ("works", "skipped")
    assert "resumes bit-exactly" in found["train CPU fp32"]["value"]
    ddp = found["train ddp fp32"]
    assert ddp["status"] == "skipped" or "resumes bit-exactly" in ddp["value"]


def test_progress_is_on_stderr_and_nothing_is_left_behind(examined: tuple) -> None:
    done, _, top = examined
    for group in GROUPS:
        assert f"  {group}: " in done.stderr
    assert list((top / "runs").iterdir()) == []
    assert [path.name for path in (top / "tmp").iterdir() if "doctor" in path.name] == []


def test_report_has_no_api_key(examined: tuple) -> None:
    done, _, top = examined
    assert KEY not in (top / "x.json").read_text() + done.stdout + done.stderr


def test_environment_in_which_processes_cannot_meet_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # It is for the whole process.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert main(["--quick", "--only", "network", "all-reduce", "W&B"]) == 1
    shown = capsys.readouterr().out
    assert "GLOO_SOCKET_IFNAME=nosuch0: no such interface is up" in shown
    assert "Training cannot be trusted here until this is fixed: all-reduce, network." in shown


def test_stopped_doctor_leaves_no_process_and_no_file(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "launch/doctor.py", "--quick", "--only", "training"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    doctor = subprocess.Popen(command, cwd=root, env=environment, stderr=subprocess.PIPE, text=True)
    assert doctor.stderr is not None
    for line in doctor.stderr:
        if "training: " in line:
            break
    children = psutil.Process(doctor.pid).children(recursive=True)
    doctor.terminate()
    assert doctor.wait(timeout=60) == 143
    assert children
    assert not any(child.is_running() for child in children)
    assert list(tmp_path.glob("vit_scale-doctor-*")) == []
