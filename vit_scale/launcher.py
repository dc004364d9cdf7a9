"""Set the environment variables that torch and accelerate read, and configure library logging.

torchrun and accelerate set RANK, WORLD_SIZE and so on themselves; `srun` uses different names for them.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings


def adopt_launcher() -> None:
    """Set RANK, WORLD_SIZE and so on from the launcher's variables. Call once, before importing torch."""
    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true":  # `accelerate launch --cpu`
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in slurm_variables(dict(os.environ)).items():
        os.environ.setdefault(name, value)
    if interface := gloo_interface(dict(os.environ)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def world_size() -> int:
    """Return the number of processes started by the launcher; works before the process group is initialized."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this is rank 0; works before the process group is initialized."""
    return int(os.environ.get("RANK", "0")) == 0


def slurm_variables(env: dict[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and so on for a task of a multi-task `srun` step; empty for any other process.

    A batch script or a shell inside an allocation has SLURM_NTASKS too, but runs as a single process; only the tasks
    of a step have SLURM_STEP_NUM_TASKS.
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
    """Return the first host of a Slurm node list: `gpu[07-09,12],cpu1` -> `gpu07`."""
    prefix, numbers, suffix = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes).groups("")  # type: ignore[union-attr]
    return prefix + numbers + suffix


def gloo_interface(env: dict[str, str]) -> str | None:
    """Return the network interface that gloo must use, if the one it would choose reaches no other node.

    gloo binds to the address of the host name. Where that is unknown or a loopback address, as on a default Debian or
    Ubuntu, no other node can connect. The right interface is the one with the route to node 0.
    """
    nodes_differ = env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE")) != env.get("WORLD_SIZE")
    if not nodes_differ or "GLOO_SOCKET_IFNAME" in env or _is_reachable(_host_address()):
        return None
    # 192.0.2.1 is never assigned: on node 0 itself, the interface with the default route.
    for target in (env.get("MASTER_ADDR", "localhost"), "192.0.2.1"):
        address = _address_towards(target)
        if _is_reachable(address):
            return _interface_of(address)
    return None


def _is_reachable(address: str | None) -> bool:
    return address is not None and not address.startswith("127.")


def _host_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _address_towards(host: str) -> str | None:
    """Return the address of this node from which packets to `host` leave; sends none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return probe.getsockname()[0]
        except OSError:
            return None


def _interface_of(address: str | None) -> str | None:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def _first_number(text: str) -> str:
    """`8(x4)` -> `8`."""
    return re.match(r"\d+", text).group()  # type: ignore[union-attr]


def silence_libraries() -> None:
    """Set libraries to log errors only. Call before importing them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # Warnings about a rank that has left, with stack traces.
    for name in ("DeepSpeed", "deepspeed", "torch.distributed", "torch.utils.cpp_extension", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|deepspeed|accelerate|timm|datasets|transformers)\b")
