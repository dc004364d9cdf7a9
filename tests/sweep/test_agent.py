"""The provided sweep files work with the real `wandb sweep` and `wandb agent` and a local server."""

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
    """State after the agents have exited."""

    folder: Path
    files: dict[str, str]
    operations: list[str]
    output: str

    def options(self, sweep: str, run: str) -> dict[str, Any]:
        return yaml.safe_load((self.folder / "runs/sweeps" / sweep / run / "config.yaml").read_text())

    def summary(self, sweep: str, run: str) -> dict[str, Any]:
        return json.loads((self.folder / "runs/sweeps" / sweep / run / "summary.json").read_text())


@pytest.fixture(scope="module")
def swept(tmp_path_factory, make_checkout, with_programs, tiny) -> Iterator[Swept]:  # type: ignore[no-untyped-def]
    """Upload both files with `wandb sweep`; then run one agent per sweep in parallel until no runs are left."""
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
        output = _run_agents(["sweep-0", "sweep-1"], folder, env)
        yield Swept(folder, server.files, server.operations, output)


def _run_agents(sweeps: list[str], folder: Path, env: dict[str, str]) -> str:
    """Return the output of agents on `sweeps`; always terminate them and their runs."""
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


def test_wandb_sweep_uploads_the_files_unchanged(swept: Swept, root: Path) -> None:
    for sweep, name in {"sweep-0": "lr", "sweep-1": "processes"}.items():
        shipped = yaml.safe_load((root / f"recipes/sweeps/{name}.yaml").read_text())
        sent = yaml.safe_load(swept.files[sweep])
        assert sent["command"] == shipped["command"]
        assert sent["metric"] == shipped["metric"]
        assert sent["parameters"].keys() == shipped["parameters"].keys()


def test_agent_trains_each_run_with_its_values_in_its_own_directory(swept: Swept) -> None:
    for run, values in LR_RUNS.items():
        options = swept.options("sweep-0", run)
        assert options["optim"]["lr"] == values["optim.lr"], swept.output
        assert options["optim"]["weight_decay"] == values["optim.weight_decay"]
        assert swept.summary("sweep-0", run)["finished"]
    assert {"CreateAgent", "Heartbeat"} <= set(swept.operations)


def test_agent_trains_on_two_processes_with_the_same_values(swept: Swept) -> None:
    options = swept.options("sweep-1", "pair")
    assert options["optim"]["lr"] == PROCESSES_RUNS["pair"]["optim.lr"], swept.output
    assert options["batch"]["global"] == PROCESSES_RUNS["pair"]["batch.global"]
    checkpoint = sorted((swept.folder / "runs/sweeps/sweep-1/pair/checkpoints").glob("step-*"))[-1]
    assert json.loads((checkpoint / "meta.json").read_text())["plan"]["processes"] == 2


def test_agent_run_directory_is_derived_from_the_run_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from vit_scale.recipe import build_config
    from vit_scale.train.open_run import choose_run_dir

    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    monkeypatch.setenv("WANDB_RUN_ID", "xyz")
    default, explicit = (
        build_config({"schedule": {"steps": 1}}),
        build_config({"schedule": {"steps": 1}, "run": {"dir": "d"}}),
    )
    assert choose_run_dir(default, "recipes/digits.yaml") == Path("runs/sweeps/abc/xyz")
    assert choose_run_dir(explicit, "recipes/digits.yaml") == Path("d")
    monkeypatch.delenv("WANDB_SWEEP_ID")
    assert "xyz" not in str(choose_run_dir(default, "recipes/digits.yaml")), "a run ID alone is not a sweep"


def test_sweep_metric_is_logged(swept: Swept) -> None:
    name = yaml.safe_load(swept.files["sweep-0"])["metric"]["name"]
    lines = (swept.folder / "runs/sweeps/sweep-0/first/metrics.jsonl").read_text().splitlines()
    assert sum(name in json.loads(line) for line in lines) >= 2


def test_wandb_run_id_is_the_one_assigned_by_the_agent(swept: Swept) -> None:
    assert swept.summary("sweep-0", "first")["wandb_id"] == "first"
    assert len(list((swept.folder / "runs/sweeps/sweep-0/first/wandb").glob("offline-run-*-first"))) == 1
