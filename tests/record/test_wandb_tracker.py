"""The real W&B client: offline, and online against a loopback server that works, fails, hangs or rejects the key."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from vit_scale.recipe import build_config
from vit_scale.record import wandb_tracker
from vit_scale.record.record import Record, Start
from vit_scale.record.terminal import Terminal
from vit_scale.tasks.task import Table

CHECK = {
    "matched": "vit_small", "equal": True, "reason": "", "params": 7, "timm_params": 7, "macs": 3, "timm_macs": 3,
    "differences": [], "stages": {"patch_embed": {"ours": [[1, 4, 8]], "timm": [[1, 4, 8]]}},
}  # fmt: skip
FACTS = {"model": "vit_mu", "params": 7, "peak_source": "measured"}


@pytest.fixture(scope="module")
def servers(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("wandb_server", root / "tests/wandb_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wandb_server"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server(servers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server that the client in this process is logged in to."""
    import wandb

    with servers.WandbServer() as server:
        for key, value in (server.environment() | {"WANDB_SILENT": "true"}).items():
            monkeypatch.setenv(key, value)
        yield server
        server.mode = "ok"
        wandb.teardown()


def open_record(folder: Path, printed: list[str], *, step: int = 0, **track: Any) -> Record:
    config = build_config({"schedule": {"steps": 9}, "track": {"wandb": "auto", **track}})
    terminal = Terminal(enabled=False)
    terminal.info = printed.append  # type: ignore[method-assign]
    record = Record(folder, config, start=Start(step), facts=FACTS, terminal=terminal)
    record.start_trackers(CHECK)
    return record


def steps_of(run: Any) -> list[int]:
    return [row["_step"] for row in run.rows]


def only_run(server: Any) -> Any:
    (run,) = server.runs.values()
    return run


def sync(command: str, server: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        env=os.environ | server.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------------- server works


def test_everything_logged_reaches_the_server(server: Any, tmp_path: Path) -> None:
    printed: list[str] = []
    record = open_record(tmp_path, printed, artifact=True, group="g", tags=["a"])
    record.log(1, {"train/loss": 2.0, "train/grad_norm": float("nan")})
    record.log(2, {"train/loss": 1.0, "epoch": 0.5})
    record.log(2, {"val/top1": 0.25})
    record.image(2, "mistakes", lambda: Image.new("RGB", (4, 4)), title="", caption="")
    record.table(2, Table("confusion", "Confusion matrix", ["cat", "dog"], [[1, 2], [3, 4]], matrix=True), "ema")
    record.table(2, Table("words", "Words", ["word", "times"], [["the", 7]]), "raw")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    record.weights([tmp_path / "model.safetensors"])
    record.write_summary(**{"best/val/top1": 0.25})
    assert record.close(finished=True) is None, "nothing is left to upload"
    assert printed == []
    run = only_run(server)
    assert steps_of(run) == [0, 1, 2]
    assert [row["step"] for row in run.rows] == [0, 1, 2]
    assert run.rows[2]["train/loss"] == 1.0
    assert run.rows[2]["val/top1"] == 0.25
    assert run.summary["val/top1"] == 0.25, "a number, as sweeps need it"
    assert run.summary["best/val/top1"] == 0.25
    assert run.summary["finished"] is True
    assert run.summary["timm"]["matched"] == "vit_small"
    assert run.exit_code == 0
    assert run.details["displayName"] == tmp_path.name
    assert run.details["groupName"] == "g"
    assert run.artifacts[f"{run.id}-weights"] == {"model.safetensors": b"weights"}
    assert any("mistakes" in name for name in run.files)
    table = next(content for name, content in run.files.items() if "shapes" in name)
    assert json.loads(table)["data"] == [["patch_embed", "[[1, 4, 8]]", "[[1, 4, 8]]"]]
    confusion = next(content for name, content in run.files.items() if "confusion" in name)
    assert ["dog", "cat", 3] in json.loads(confusion)["data"]
    panel = run.config["_wandb"]["value"]["visualize"]["confusion"]["panel_config"]
    assert panel["stringSettings"]["title"] == "Confusion matrix, ema weights"
    words = next(content for name, content in run.files.items() if "words" in name)
    assert json.loads(words)["data"] == [["the", 7]]


def test_options_versions_commit_and_check_are_in_the_config(server: Any, tmp_path: Path) -> None:
    open_record(tmp_path, []).close()
    config = {key: entry["value"] for key, entry in only_run(server).config.items()}
    assert config["schedule"]["steps"] == 9
    assert config["versions"]["torch"]
    assert "git_commit" in config
    assert config["facts"]["timm_check"]["stages"]["patch_embed"]["timm"] == [[1, 4, 8]]
    assert config["facts"]["peak_source"] == "measured"
    plots = config["_wandb"]["m"]
    assert any(metric.get("2") == "*" and metric.get("5") for metric in plots), "all metrics are drawn over the step"


# ---------------------------------------------------------------------------------------------------------- resuming


def test_resumed_run_is_the_same_run_with_increasing_steps(server: Any, tmp_path: Path) -> None:
    first = open_record(tmp_path, [])
    for step in (2, 4, 6):
        first.log(step, {"train/loss": 1.0})
    first.close()
    again = open_record(tmp_path, [], step=4)  # killed after step 6, saved after step 4
    for step in (6, 8):
        again.log(step, {"train/loss": 0.5})
    again.close()
    assert steps_of(only_run(server)) == [0, 2, 4, 6, 8]
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [2, 4, 6, 8], "the local record has each step once, too"


def test_run_killed_before_its_first_checkpoint_restarts_as_the_same_run(server: Any, tmp_path: Path) -> None:
    for steps in [(1, 2), (1, 2, 3)]:
        record = open_record(tmp_path, [])
        for step in steps:
            record.log(step, {"train/loss": 1.0})
        record.close()
    assert steps_of(only_run(server)) == [0, 1, 2, 3]


def test_offline_parts_are_synced_by_one_command_with_increasing_steps(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    for start, logged in [(0, (2, 4, 6)), (2, (4,)), (2, (4, 6, 8))]:
        record = open_record(tmp_path, printed, step=start)
        for step in logged:
            record.log(step, {"train/loss": 1.0})
        time.sleep(1.1)  # the client names its folders by the second
        command = record.close()
    assert printed == []
    assert command is not None
    assert command.count("offline-run-") == 3
    sync(command, server)
    steps = steps_of(only_run(server))
    assert steps == sorted(set(steps)), "no step comes twice, none goes back"
    assert steps[-1] == 8


def test_killed_run_resumes_as_the_same_run(server: Any, root: Path, tmp_path: Path) -> None:
    options = ["run.log_every=1", "run.save_every=3", "run.eval_every=20", "schedule.steps=8", "track.images=never"]
    command = [sys.executable, "tests/workers/pauses_once.py", str(tmp_path / "flag"), "recipes/debug.yaml"]
    command += [*options, f"run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen(command, cwd=root, start_new_session=True)
    try:
        wait_until(lambda: any(row["_step"] >= 4 for run in server.runs.values() for row in run.rows))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    logged = max(steps_of(only_run(server)))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Resuming from" in done.stdout
    steps = steps_of(only_run(server))
    assert logged >= 4
    assert steps == sorted(set(steps))
    assert steps[-1] == 8


def wait_until(ready: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------- server fails


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("broken", "HTTP 500"), ("hanging", "no response within 1 s"), ("refusing", "rejects the API key")],
)
def test_unusable_server_gives_an_offline_run_and_one_line(
    server: Any, mode: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_tracker, "INIT_TIMEOUT_S", 1.0)
    monkeypatch.chdir(tmp_path)
    server.mode, printed = mode, []
    record = open_record(tmp_path, printed)
    for step in (1, 2):
        record.log(step, {"train/loss": 1.0})
    command = record.close()
    assert len(printed) == 1
    assert reason in printed[0]
    assert "Logging offline; training continues" in printed[0]
    assert command is not None
    assert command.startswith("wandb sync wandb/offline-run-")
    server.mode = "ok"
    sync(command, server)
    assert steps_of(only_run(server)) == [0, 1, 2], "no step is missing"


@pytest.mark.parametrize(("mode", "lines"), [("broken", 1), ("hanging", 1), ("refusing", 0)])
def test_steps_that_a_failing_server_missed_can_be_synced(
    server: Any, mode: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_tracker, "FINISH_TIMEOUT_S", 1.0)
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    record = open_record(tmp_path, printed)
    wait_until(lambda: "CommitArtifact" in server.asked)  # the table of shapes has arrived
    server.mode = mode
    record.log(1, {"train/loss": 1.0})
    command = record.close()
    assert len(printed) == lines
    assert command is not None
    server.mode = "ok"
    sync(command, server)
    assert steps_of(only_run(server)) == [0, 1]


def test_no_network_gives_an_offline_run(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_tracker, "INIT_TIMEOUT_S", 1.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    printed: list[str] = []
    record = open_record(tmp_path, printed)
    record.log(1, {"train/loss": 1.0})
    assert "offline-run" in str(record.close())
    assert len(printed) == 1


@pytest.mark.parametrize(("asked", "lines"), [("auto", 0), ("online", 1)])
def test_api_key_is_never_prompted_for(
    asked: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Any
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    printed: list[str] = []
    record = open_record(tmp_path, printed, wandb=asked)
    record.log(1, {"train/loss": 1.0})
    assert "offline-run" in str(record.close())
    assert len(printed) == lines
    assert server.asked == []


def test_interrupted_evaluation_is_logged_on_resume_though_its_step_is(tmp_path: Path) -> None:
    logged: list[tuple[int, dict[str, Any]]] = []
    tracker = wandb_tracker.WandbTracker(
        build_config({"schedule": {"steps": 9}}),
        tmp_path,
        run_id="x",
        resumed=True,
        last_logged_step=6,
        pending_step=4,
        facts={},
        info=print,
    )
    tracker._run = SimpleNamespace(log=lambda values, step: logged.append((step, values)))
    for step in (3, 4, 5, 8):
        tracker.log(step, {"val/top1": 0.5})
    assert logged == [(7, {"step": 4, "val/top1": 0.5}), (8, {"step": 8, "val/top1": 0.5})]
