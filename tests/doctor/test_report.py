"""The table, the verdict, the exit status, and what a report must not contain."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path

import pytest
from rich.console import Console

from vit_scale.doctor import report
from vit_scale.doctor.check import Check, Setup, broken, largest, skipped, slow, works

GOOD = works("matmul", "60 GFLOP/s")
SLOW = slow("disk", "3 MB/s", "use another")
BROKEN = broken("flash", "wrong by 1e-01", "set model.kernel=math")
OPTIONAL = broken("Hub", "does not answer", "use the cache", required=False)
SKIPPED = skipped("gpu", "no GPU")


@pytest.mark.parametrize(
    ("checks", "status"),
    [([GOOD, SLOW, SKIPPED, OPTIONAL], 0), ([GOOD, BROKEN], 1), ([SLOW], 0), ([], 1)],
    ids=["slow and optional", "broken", "slow", "nothing checked"],
)
def test_exit_status_says_whether_training_can_be_trusted(checks: list[Check], status: int) -> None:
    assert report.exit_status(checks) == status


def test_verdict_names_what_is_broken() -> None:
    assert report.verdict([GOOD, SLOW, SKIPPED, OPTIONAL]) == [
        "1 works, 1 slow, 1 broken, 1 skipped",
        "Broken, but training does not rely on it: Hub.",
        "Training can be trusted here; one check is slow.",
    ]
    assert report.verdict([GOOD, BROKEN])[-1] == "Training cannot be trusted here until this is fixed: flash."
    assert report.verdict([GOOD])[-1] == "Training can be trusted here."


def test_table_has_a_row_per_check_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_report([GOOD, SLOW, BROKEN, SKIPPED], Console(width=80))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["matmul", "works", "60", "GFLOP/s"] in lines
    assert ["disk", "slow", "3", "MB/s"] in lines
    assert ["->", "set", "model.kernel=math"] in lines


def test_report_is_json_with_every_check() -> None:
    strange = works("x", "", ratio=math.inf, tensor_shape=(1, 2))
    tree = json.loads(report.to_json([GOOD, BROKEN, strange], Setup("", gpus=0), seconds=1.25))
    assert tree["trusted"] is False
    assert [each["name"] for each in tree["checks"]] == ["matmul", "flash", "x"]
    assert tree["checks"][2]["numbers"] == {"ratio": "inf", "tensor_shape": [1, 2]}
    assert {"versions", "platform", "git_commit", "date", "seconds", "quick", "gpus"} <= tree.keys()


def test_report_has_no_secrets_and_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("DATABASE_PASSWORD", "")
    monkeypatch.setattr(Path, "home", lambda: Path("/somewhere/alice"))
    monkeypatch.setattr(report, "_user", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example.org")
    text = "key 0123456789abcdef, token hf_abcdefgh, /somewhere/alice/runs and /data/alice on node7.example.org, malice"
    written = report.to_json([broken("x", text, "", output=text)], Setup(""), seconds=1)
    for secret in ("0123456789abcdef", "hf_abcdefgh", "/alice", "node7"):
        assert secret not in written
    assert "~/runs" in written
    assert "malice" in written


def test_largest_error_of_nan_is_rejected_by_every_tolerance() -> None:
    assert largest([0.1, 0.3, 0.2]) == 0.3
    assert largest([0.1, math.nan, 0.2]) == math.inf
