"""A check that crashes or hangs is broken, and every other check still has its result."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import psutil
import pytest

from vit_scale.doctor.check import Check, Setup
from vit_scale.doctor.isolation import Probe, Watcher, child_environment, count_gpus, describe_status, run_probes


class Seen(Watcher):
    def __init__(self) -> None:
        self.started: list[str] = []
        self.stages: list[str] = []
        self.ticks = 0

    def start(self, probe: Probe) -> None:
        self.started.append(probe.name)

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def tick(self) -> None:
        self.ticks += 1


@pytest.fixture(autouse=True)
def _bad_checks(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(root / "tests/workers"))


def probe(function: str, **options: object) -> Probe:
    fields = {"name": function, "group": "devices", "function": f"doctor_checks:{function}", "advice": "do this"}
    return Probe(**fields | options)  # type: ignore[arg-type]


def run(tmp_path: Path, *probes: Probe) -> tuple[dict[str, list[Check]], Seen]:
    seen = Seen()
    return {each.name: checks for each, checks in run_probes(probes, Setup(str(tmp_path)), seen)}, seen


def test_crash_hang_and_errors_end_one_check_each(tmp_path: Path) -> None:
    probes = [
        probe("good", name="first", arguments={"value": "a"}),
        probe("several"),
        probe("illegal_instruction"),
        probe("raises"),
        probe("refuses", required=False),
        probe("hangs", timeout=3.0),
        probe("leaves"),
        probe("good", name="last", arguments={"value": "b"}),
    ]
    found, seen = run(tmp_path, *probes)
    assert seen.started == [each.name for each in probes]
    assert seen.ticks > len(probes)
    assert "multiplying in bf16" in seen.stages
    assert [found[name][0].value for name in ("first", "last")] == ["a", "b"]
    assert [each.name for each in found["several"]] == ["several 0", "several 1", "several 2"]
    broken = {each.name: each for name in found for each in found[name] if each.status == "broken"}
    assert broken.keys() == {"illegal_instruction", "raises", "refuses", "hangs", "leaves"}
    assert broken["illegal_instruction"].value == (
        "the process was killed by SIGILL (illegal instruction) while multiplying in bf16"
    )
    assert broken["illegal_instruction"].advice == "do this"
    assert broken["hangs"].value == "no result within 3 s while waiting for the driver"
    assert broken["raises"].value == "RuntimeError: operator torchvision::nms does not exist"
    assert (broken["refuses"].value, broken["refuses"].advice) == ("No strategy of that name", "Use another.")
    assert not broken["refuses"].required
    assert broken["leaves"].value == "the process exited with status 3"
    assert "the last words" in broken["leaves"].numbers["output"]


def test_checks_share_a_process_until_one_crashes(tmp_path: Path) -> None:
    probes = [probe("good", name=name) for name in "ab"]
    found, _ = run(tmp_path, *probes, probe("illegal_instruction"), probe("good", name="c"))
    first, second, third = (found[name][0].numbers["process"] for name in "abc")
    assert first == second != third


def test_hanging_processes_and_their_children_are_killed(tmp_path: Path) -> None:
    run(tmp_path, probe("hangs", timeout=3.0))
    pid = int((tmp_path / "hanging.pid").read_text())
    commands = [each.info for each in psutil.process_iter(["pid", "cmdline", "status"])]
    left = [each for each in commands if str(tmp_path) in " ".join(each["cmdline"] or [])]
    assert [each for each in left if each["status"] != psutil.STATUS_ZOMBIE] == []
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("function", "value"),
    [
        ("last_rank_fails", "ValueError: only rank 1 knows why"),
        ("last_rank_dies", "rank 1 of 2 was killed by SIGKILL (killed)"),
    ],
)
def test_failing_rank_is_reported_and_ends_the_others(tmp_path: Path, function: str, value: str) -> None:
    found, _ = run(tmp_path, probe(function, processes="all"), probe("ranks", processes="all"))
    assert found[function][0].value == value
    assert found["ranks"][0].value == "0 of 2"


def test_cpu_checks_see_no_gpu_and_ranks_have_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("RANK", "7")
    single = child_environment(0, 1, 1234, hide_gpus=True)
    assert single["CUDA_VISIBLE_DEVICES"] == ""
    assert single.keys().isdisjoint(["RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"])
    ranks = child_environment(1, 4, 1234)
    assert (ranks["RANK"], ranks["LOCAL_RANK"], ranks["WORLD_SIZE"], ranks["MASTER_PORT"]) == ("1", "1", "4", "1234")


def test_unknown_signals_and_exit_codes_are_described() -> None:
    assert describe_status(1) == "exited with status 1"
    assert describe_status(-200) == "was killed by signal 200"
    assert describe_status(-11) == "was killed by SIGSEGV (segmentation fault)"


def test_driver_that_crashes_or_hangs_counts_as_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert count_gpus(Watcher()) == 0
    (tmp_path / "torch.py").write_text("import time; time.sleep(100)")
    assert count_gpus(Watcher(), timeout=0.5) == 0


def test_one_gpu_is_checked_by_one_rank() -> None:
    setup = Setup("")
    assert (setup.processes, setup.device) == (2, "cpu")
    assert dataclasses.replace(setup, gpus=1).processes == 1
    assert dataclasses.replace(setup, gpus=8).processes == 8
    assert dataclasses.replace(setup, gpus=8).device == "cuda"
    assert os.environ.get("RANK") is None
