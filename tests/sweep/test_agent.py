"""The shipped sweep files under the real `wandb sweep` and `wandb agent`, with a server on loopback."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from agent_server import ENTITY, PROJECT, AgentServer

LR_RUNS = {
    "first": {"optim.lr": 0.00123, "optim.weight_decay": 0.1},
    "second": {"optim.lr": 4.56e-05, "optim.weight_decay": 0.02},
}
PROCESSES_RUNS = {"pair": {"optim.lr": 0.0025, "batch.global": 64}}


@dataclass
class Swept:
    """What is there after the agents have left."""

    folder: Path
    files: dict[str, str]
    asked: list[str]
    said: str

    def options(self, sweep: str, run: str) -> dict[str, Any]:
        return yaml.safe_load((self.folder / "runs/sweeps" / sweep / run / "config.yaml").read_text())

    def summary(self, sweep: str, run: str) -> dict[str, Any]:
        return json.loads((self.folder / "runs/sweeps" / sweep / run / "summary.json").read_text())


@pytest.fixture(scope="module")
def swept(tmp_path_factory, make_checkout, with_programs, tiny) -> Iterator[Swept]:  # type: ignore[no-untyped-def]
    """Both files sent by `wandb sweep`; then an agent on each, side by side, until there are no runs left."""
    folder = make_checkout(tmp_path_factory.mktemp("agent"))
    private = {name: str(folder / "private") for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR")}
    private |= {"WANDB_DATA_DIR": str(folder / "private"), "HOME": str(folder)}
    (folder / "private").mkdir()
    with AgentServer() as server:
        env = {k: v for k, v in with_programs.items() if k != "WANDB_MODE"} | server.environment() | private
        for name in ("lr", "processes"):
            send = ["wandb", "sweep", "--project", PROJECT, "--entity", ENTITY, f"recipes/sweeps/{name}.yaml"]
            subprocess.run(send, cwd=folder, env=env, capture_output=True, timeout=120, check=True)
        for sweep, runs in {"sweep-0": LR_RUNS, "sweep-1": PROCESSES_RUNS}.items():
            for run_id, values in runs.items():
                server.queue(sweep, run_id, values | tiny | {"track.wandb": "offline"})
        said = _run_agents(["sweep-0", "sweep-1"], folder, env)
        yield Swept(folder, server.files, server.asked, said)


def _run_agents(sweeps: list[str], folder: Path, env: dict[str, str]) -> str:
    """All that agents on `sweeps` say; whatever happens, neither they nor their trainings are left."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    commands = [["wandb", "agent", f"{ENTITY}/{PROJECT}/{sweep}"] for sweep in sweeps]
    agents = [subprocess.Popen(command, cwd=folder, env=env, **pipes) for command in commands]
    try:
        return "\n".join(agent.communicate(timeout=400)[0] for agent in agents)
    finally:
        for agent in agents:
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = psutil.Process(agent.pid)
                for process in (*tree.children(recursive=True), tree):
                    process.kill()


def test_wandb_sweep_sends_the_files_as_they_are(swept: Swept, root: Path) -> None:
    for sweep, name in {"sweep-0": "lr", "sweep-1": "processes"}.items():
        shipped = yaml.safe_load((root / f"recipes/sweeps/{name}.yaml").read_text())
        sent = yaml.safe_load(swept.files[sweep])
        assert sent["command"] == shipped["command"]
        assert sent["metric"] == shipped["metric"]
        assert sent["parameters"].keys() == shipped["parameters"].keys()


def test_agent_trains_each_run_with_the_values_handed_out_in_its_own_folder(swept: Swept) -> None:
    for run, values in LR_RUNS.items():
        options = swept.options("sweep-0", run)
        assert options["optim"]["lr"] == values["optim.lr"], swept.said
        assert options["optim"]["weight_decay"] == values["optim.weight_decay"]
        assert swept.summary("sweep-0", run)["finished"]
    assert {"CreateAgent", "Heartbeat"} <= set(swept.asked)


def test_agent_trains_on_two_processes_that_all_have_the_values(swept: Swept) -> None:
    options = swept.options("sweep-1", "pair")
    assert options["optim"]["lr"] == PROCESSES_RUNS["pair"]["optim.lr"], swept.said
    assert options["batch"]["global"] == PROCESSES_RUNS["pair"]["batch.global"]
    checkpoint = sorted((swept.folder / "runs/sweeps/sweep-1/pair/checkpoints").glob("step-*"))[-1]
    assert json.loads((checkpoint / "meta.json").read_text())["plan"]["processes"] == 2


def test_run_folder_of_an_agent_is_the_runs_own_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from vit_scale.recipe import build_config
    from vit_scale.train.open_run import choose_run_dir

    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    monkeypatch.setenv("WANDB_RUN_ID", "xyz")
    plain, given = (
        build_config({"schedule": {"steps": 1}}),
        build_config({"schedule": {"steps": 1}, "run": {"dir": "d"}}),
    )
    assert choose_run_dir(plain, "recipes/digits.yaml") == Path("runs/sweeps/abc/xyz")
    assert choose_run_dir(given, "recipes/digits.yaml") == Path("d")
    monkeypatch.delenv("WANDB_SWEEP_ID")
    assert "xyz" not in str(choose_run_dir(plain, "recipes/digits.yaml")), "a run id alone is no sweep"


def test_the_swept_metric_is_logged(swept: Swept) -> None:
    name = yaml.safe_load(swept.files["sweep-0"])["metric"]["name"]
    lines = (swept.folder / "runs/sweeps/sweep-0/first/metrics.jsonl").read_text().splitlines()
    assert sum(name in json.loads(line) for line in lines) >= 2


def test_wandb_keeps_the_run_that_the_agent_was_given(swept: Swept) -> None:
    assert swept.summary("sweep-0", "first")["wandb_id"] == "first"
    assert len(list((swept.folder / "runs/sweeps/sweep-0/first/wandb").glob("offline-run-*-first"))) == 1
