"""Settings of launchers, and how processes find each other."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from vit_scale.doctor.check import Check, Setup, broken, skipped, slow, works
from vit_scale.doctor.checks.devices import usable_cores
from vit_scale.doctor.isolation import kill_tree
from vit_scale.errors import first_line

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "VIT_SCALE_KERNELS": "0",
}
"""Variables for debugging, and the values that slow training down."""
MIN_OPEN_FILES = 1024
LAUNCH_TIMEOUT = 120


def launcher(setup: Setup) -> Check:
    """Read the configuration file of accelerate and compare it with this machine."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    name = "launcher"
    if not Path(default_config_file).exists():
        return works(name, "accelerate has no configuration file: pass its options, or --config_file")
    try:
        config = load_config_from_file(None).to_dict()
    except Exception as error:  # noqa: BLE001 -- whatever the file contains
        advice = "run `accelerate config` again, or pass --config_file accelerate_config.yaml"
        return broken(name, f"accelerate's configuration file cannot be read: {first_line(error)}", advice)
    if problem := _launcher_problem(config, setup.gpus):
        return slow(name, problem, "run `accelerate config` again, or pass --config_file accelerate_config.yaml")
    return works(name, f"accelerate is configured for {config.get('num_processes')} processes")


def _launcher_problem(config: dict[str, Any], gpus: int) -> str | None:
    processes, machines = int(config.get("num_processes") or 1), int(config.get("num_machines") or 1)
    if gpus and config.get("use_cpu"):
        return "accelerate is configured for the CPU: use_cpu is true, but there are GPUs"
    if gpus and machines == 1 and processes != gpus:
        return f"accelerate is configured for {processes} processes, but there are {gpus} GPUs"
    if not gpus and processes > usable_cores():
        return f"accelerate is configured for {processes} processes, but there are {usable_cores():g} cores"
    return None


def environment(setup: Setup) -> Check:
    """Look for variables and limits that slow training down or break it."""
    name, cores = "environment", int(usable_cores())
    odd = [f"{key}={value}" for key, value in SLOWING.items() if os.environ.get(key) == value]
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and not threads.isdigit():
        return broken(name, f"OMP_NUM_THREADS={threads} is no number", "unset OMP_NUM_THREADS")
    if threads is not None and not setup.gpus and int(threads) < cores:
        odd.append(f"OMP_NUM_THREADS={threads} with {cores} cores")
    if (files := _open_files()) is not None and files < MIN_OPEN_FILES:
        advice = "ulimit -n 65536: workers and processes share many files"
        return broken(name, f"only {files} open files are allowed", advice, open_files=files)
    if odd:
        return slow(name, ", ".join(odd), "unset these, unless you are debugging")
    shown = f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set"
    return works(name, f"{shown}; no variable that slows training down")


def interfaces(setup: Setup) -> Check:
    """Check the network interfaces that processes of several nodes use to find each other."""
    name = "network"
    up = {each for each, state in psutil.net_if_stats().items() if state.isup}
    for variable in INTERFACE_VARIABLES:
        value = os.environ.get(variable, "")
        if value and not finds_interface(variable, value, up):
            advice = f"unset {variable}, or use one of {', '.join(sorted(up))}"
            return broken(name, f"{variable}={value}: no such interface is up", advice)
    outside = sorted(up & set(_addresses()))
    listed = f"interfaces {', '.join(outside)}" if outside else "no interface except loopback"
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return works(name, f"{listed}; GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']}")
    if is_loopback_only():
        value = f"{listed}; the host name resolves to loopback: fine on one node, not on several"
        return works(
            name, value, advice=f"on several nodes: export GLOO_SOCKET_IFNAME={outside[0] if outside else 'eth0'}"
        )
    return works(name, f"{listed}; the host name resolves to one of them")


def finds_interface(variable: str, value: str, up: set[str]) -> bool:
    """Return whether `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` with this value finds an interface that is up.

    gloo needs each name in the list; NCCL takes beginnings of names, after `=` names, after `^` those to avoid.
    """
    listed = [each for each in value.lstrip("^=").split(",") if each]
    if not variable.startswith("NCCL"):
        return up.issuperset(listed)
    is_exact, avoids = "=" in value[:2], value.startswith("^")
    return any(((each in listed) if is_exact else each.startswith(tuple(listed))) != avoids for each in up)


def is_loopback_only() -> bool:
    """Return whether the host name resolves to no address that other nodes reach; gloo listens there."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return True
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in found)


def accelerate_launch(setup: Setup) -> Check:
    """Start two processes as users do, which agree on a number."""
    if setup.quick:
        return skipped("accelerate launch", "--quick")
    processes = 1 if setup.gpus == 1 else 2
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--num_processes"]
    command += [str(processes), "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--multi_gpu"] if processes > 1 else []
    script = Path(setup.scratch) / "agree.py"
    script.write_text(_AGREE, encoding="utf-8")
    setup.stage(f"starting {processes} processes")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, str(script)], **pipes)
    try:
        output, errors = process.communicate(timeout=LAUNCH_TIMEOUT)
    except subprocess.TimeoutExpired:
        advice = "processes do not find each other: check host name, firewall and proxies; torchrun may work"
        return broken("accelerate launch", f"no answer within {LAUNCH_TIMEOUT} s", advice)
    finally:
        kill_tree(process)
    if process.returncode or f"agreed on {processes}" not in output:
        lines = [line for line in errors.splitlines() if "Error" in line] or errors.splitlines()[-1:]
        value = f"fails with status {process.returncode}: {''.join(lines[:1]).strip()}"
        return broken("accelerate launch", value, "run `accelerate env`; see docs/doctor.md", output=errors[-2000:])
    return works("accelerate launch", f"starts {processes} processes" if processes > 1 else "starts a process")


_AGREE = """
import torch
import vit_scale.launcher
from vit_scale.strategies.processes import close_processes, join_processes

vit_scale.launcher.silence_libraries()
here = join_processes()
one = torch.ones(1, device=here.device)
if here.world > 1:
    torch.distributed.all_reduce(one)
if here.is_main:
    print("agreed on", int(one.item()))
close_processes()
"""


def _addresses() -> dict[str, str]:
    """Return an address of each interface that is not loopback."""
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                address = ipaddress.ip_address(each.address.split("%")[0])
                if not address.is_loopback and not address.is_link_local:
                    found[name] = each.address
    return found


def _open_files() -> int | None:
    """Return how many open files a process may have; None if that is not limited or unknown."""
    try:
        import resource  # Unix only
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
