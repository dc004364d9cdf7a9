"""What launchers tell their processes, put into the variables that torch and accelerate read.

torchrun and accelerate set RANK, WORLD_SIZE and so on themselves; `srun` has names of its own for them.
"""

from __future__ import annotations

import logging
import os
import re
import warnings


def adopt_launcher() -> None:
    """Called once, before torch is imported."""
    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true":  # `accelerate launch --cpu`
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in slurm_variables(dict(os.environ)).items():
        os.environ.setdefault(name, value)


def world_size() -> int:
    """Processes that the launcher started, before any of them has spoken to another."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is the process that speaks, known before any set-up."""
    return int(os.environ.get("RANK", "0")) == 0


def slurm_variables(env: dict[str, str]) -> dict[str, str]:
    """RANK and the like for a process that `srun` started beside others; nothing for any other process.

    A batch script, or a shell inside an allocation, has SLURM_NTASKS too, but nobody beside it; only the tasks of a
    step have SLURM_STEP_NUM_TASKS.
    """
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in env or tasks == "1":
        return {}
    one_gpu_visible = re.fullmatch(r"[^,]+", env.get("CUDA_VISIBLE_DEVICES", ""))  # as with --gpus-per-task
    job, step = int(env.get("SLURM_JOB_ID", "0")), int(env.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": "0" if one_gpu_visible else env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": _first_number(env.get("SLURM_STEP_TASKS_PER_NODE", tasks)),
        "MASTER_ADDR": first_host(env.get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": str(20_000 + (job + step) % 10_000),
    }


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: `gpu[07-09,12],cpu1` -> `gpu07`."""
    prefix, numbers, suffix = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes).groups("")  # type: ignore[union-attr]
    return prefix + numbers + suffix


def _first_number(text: str) -> str:
    """`8(x4)` -> `8`."""
    return re.match(r"\d+", text).group()  # type: ignore[union-attr]


def silence_libraries() -> None:
    """Called before the libraries are imported; errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    for name in ("DeepSpeed", "deepspeed", "torch.distributed", "torch.utils.cpp_extension", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|deepspeed|accelerate|timm|datasets|transformers)\b")
