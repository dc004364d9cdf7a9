"""One recipe, started with every launcher in docs/scaling.md, on CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

LaunchProcesses = Callable[..., list[subprocess.CompletedProcess]]
ACCELERATE = [str(Path(sys.executable).with_name("accelerate")), "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO_PROCESSES = "32 (2 processes x 1 accumulation step x 16 images)"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launchers would use every GPU")


def training(folder: Path, *options: str) -> list[str]:
    common = ["track.wandb=disabled", "data.workers=0", "schedule.steps=4", "run.eval_every=100"]
    return ["launch/train.py", "recipes/debug.yaml", *common, f"run.dir={folder}", *options]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def assert_single_run(done: list[subprocess.CompletedProcess], folder: Path, batch: str, strategy: str) -> None:
    output = "".join(each.stdout + each.stderr for each in done)
    assert all(each.returncode == 0 for each in done), output[-3000:]
    assert output.count("Training recipes/debug.yaml") == 1, "only one process prints"
    assert batch in output
    assert "built successfully" not in output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"]
    assert summary["strategy"] == strategy
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [2, 4]


def test_plain_accelerate_launch(launch_processes: LaunchProcesses, tmp_path: Path) -> None:
    done = launch_processes([*ACCELERATE, *training(tmp_path)])
    assert_single_run(done, tmp_path, "1 process x 2 accumulation steps x 16 images", "single")
    assert done[0].stdout.startswith("Training recipes/debug.yaml"), "no output precedes the header"


def test_recipe_overrides_deepspeed_flags_of_the_launcher(launch_processes: LaunchProcesses, tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 20_000}
    (tmp_path / "deepspeed.json").write_text(json.dumps({"zero_optimization": zero, "train_batch_size": 64}))
    flags = ["--config_file", "accelerate_config.yaml", "--num_processes", "2", "--main_process_port", "0"]
    deepspeed = ["--use_deepspeed", "--deepspeed_config_file", str(tmp_path / "deepspeed.json")]
    done = launch_processes([*ACCELERATE, *flags, *deepspeed, *training(tmp_path)])
    assert_single_run(done, tmp_path, TWO_PROCESSES, "zero3")
    assert done[0].stdout.count("train_batch_size = 64") == 1


def test_default_config_uses_every_gpu_or_every_core(root: Path) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env
    from torch.distributed.run import determine_local_world_size

    arguments = ["--config_file", str(root / "accelerate_config.yaml"), "--main_process_port", "0", "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    prepare_multi_gpu_env(args)
    assert args.multi_gpu
    assert determine_local_world_size(args.nproc_per_node) == torch._utils.cpu_count()


def test_two_nodes(launch_processes: LaunchProcesses, tmp_path: Path) -> None:
    flags = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    flags += ["--main_process_port", free_port(), "--config_file", "accelerate_config.yaml"]
    nodes = [[*ACCELERATE, *flags, "--machine_rank", str(rank), *training(tmp_path)] for rank in (0, 1)]
    assert_single_run(launch_processes(*nodes), tmp_path, TWO_PROCESSES, "ddp")


def test_torchrun_uses_the_strategy_of_the_recipe(launch_processes: LaunchProcesses, tmp_path: Path) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", *training(tmp_path, "parallel.strategy=zero2")]
    assert_single_run(launch_processes(command), tmp_path, TWO_PROCESSES, "zero2")


# Stub of srun: starts two tasks, as Slurm would on one node, and sends Slurm's signal once they have logged.
SRUN = """#!{python}
import os, signal, subprocess, sys, time
command = [word for word in sys.argv[1:] if not word.startswith("--")]
step = {{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}}
tasks = []
for rank in "01":
    env = os.environ | step | {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank}}
    tasks.append(subprocess.Popen(command, env=env))
log = {metrics!r}
while not (os.path.exists(log) and os.path.getsize(log)) and all(task.poll() is None for task in tasks):
    time.sleep(0.05)
for task in tasks:
    task.send_signal(signal.SIGUSR1)
sys.exit(max(task.wait() for task in tasks))
"""


def test_slurm_script_saves_and_requeues_before_the_time_limit(
    root: Path, launch_processes: LaunchProcesses, tmp_path: Path
) -> None:
    stubs = {
        "srun": SRUN.format(python=sys.executable, metrics=str(tmp_path / "run/metrics.jsonl")),
        "scontrol": f"#!/bin/sh\necho $* >> {tmp_path}/scontrol.log\n",
    }
    (tmp_path / "bin").mkdir()
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    script = (root / "launch/slurm.sh").read_text().replace("PYTHON=.venv/bin/python", f"PYTHON={sys.executable}")
    (tmp_path / "slurm.sh").write_text(script)  # sbatch also runs a copy from another directory
    job = str(int(free_port()) % 10_000)
    command = ["bash", str(tmp_path / "slurm.sh"), *training(tmp_path / "run", "schedule.steps=100000")[1:]]
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    (done,) = launch_processes(command, PATH=path, SLURM_SUBMIT_DIR=str(root), SLURM_JOB_ID=job)
    assert done.returncode == 138, done.stdout[-2000:] + done.stderr[-2000:]
    assert TWO_PROCESSES in done.stdout
    assert "SIGUSR1" in done.stdout
    assert list((tmp_path / "run/checkpoints").glob("step-*/manifest.json"))
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {job}\n"
