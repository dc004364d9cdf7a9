"""Which checks there are, and running them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vit_scale.cost.strategy_names import STRATEGIES
from vit_scale.doctor.check import GROUPS, Check, Setup
from vit_scale.doctor.isolation import Probe, Watcher, run_probes
from vit_scale.errors import UserError, did_you_mean

CRASHED = "reinstall torch and the driver; `--json FILE` writes a report to attach to a bug report"


def all_probes(gpus: int, *, quick: bool = False) -> list[Probe]:
    """Return every probe in the order in which they run."""
    kernels = [
        _probe("attention", f"attention {name}", "attention_kernels:kernel", name=name)
        for name in ("flash", "efficient", "cudnn", "math")
    ]
    precisions = [_precision(name) for name in ("fp32", "tf32", "bf16", "fp16")]
    return [
        _probe("versions", "packages", "versions:required_versions"),
        _probe("versions", "tested versions", "versions:tested_versions"),
        _probe("versions", "imports", "versions:imports", timeout=240),
        _probe("devices", "cpu", "devices:cpu"),
        _probe("devices", "gpu", "devices:gpus"),
        *kernels,
        _probe("attention", "attention cpu kernel", "attention_kernels:custom_kernel"),
        *precisions,
        _probe("precision", "compile", "precision:compiled", timeout=240, advice="do not set parallel.compile"),
        _probe("compute", "matmul", "compute:matmul"),
        _probe("compute", "memory bandwidth", "compute:memory"),
        _probe("loading", "loader", "loading:loader", advice="try data.workers=0"),
        _probe("loading", "decoding", "loading:pixels"),
        _probe("disk", "checkpoint disk", "disk:checkpoints", advice="choose another disk with run.dir"),
        _probe("disk", "free disk", "disk:free_space"),
        _probe("disk", "run lock", "disk:locks", advice="a file system that hangs in a lock cannot hold runs"),
        _probe("disk", "shared memory", "disk:shared_memory"),
        _probe("tracking", "W&B", "tracking:wandb_login", required=False, advice="set WANDB_MODE=offline"),
        _probe("tracking", "Hub", "tracking:hub", required=False, advice="set HF_HUB_OFFLINE=1"),
        _probe("network", "launcher", "network:launcher"),
        _probe("network", "environment", "network:environment"),
        _probe("network", "network", "network:interfaces"),
        _probe("network", "accelerate launch", "network:accelerate_launch", timeout=180),
        _probe("communication", "peer access", "communication:peer_access"),
        # First what one process does, then what all do: processes are started as rarely as possible.
        *sorted([*_on_all_ranks(), *_training(gpus, quick=quick)], key=lambda probe: probe.processes == "all"),
    ]


def _probe(group: str, name: str, function: str, /, **options: Any) -> Probe:
    """Return a probe; options that are no fields of `Probe` are arguments of the function."""
    fields = {key: options.pop(key) for key in ("timeout", "advice", "required", "processes") if key in options}
    fields.setdefault("advice", CRASHED)
    return Probe(name, group, f"vit_scale.doctor.checks.{function}", arguments=options, **fields)


def _precision(name: str) -> Probe:
    # Training refuses a precision in which a CPU crashes, so that breaks nothing.
    advice = f"do not set parallel.precision={name}"
    return _probe("precision", name, "precision:precision", name=name, advice=advice, required=name == "fp32")


def _on_all_ranks() -> list[Probe]:
    advice = "processes cannot talk to each other: check GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO and firewall"
    names = {"all-reduce": "all_reduce", "sharding": "sharded", "signals": "signals"}
    return [
        _probe("communication", name, f"communication:{function}", processes="all", advice=advice)
        for name, function in names.items()
    ]


def _training(gpus: int, *, quick: bool) -> list[Probe]:
    """Return the runs: on the CPU, on one device, and on all of them."""
    # --quick leaves out what needs DeepSpeed, and half precision.
    precisions = ("fp32",) if quick else ("fp32", "bf16", "fp16") if gpus else ("fp32", "bf16")
    strategies = ("ddp",) if quick else STRATEGIES
    probes = [_probe("training", "train CPU fp32", "training:reference", processes="cpu", timeout=240)]
    for strategy in ("single", *strategies):
        for precision in precisions:
            if strategy == "single" and precision == "fp32" and not gpus:
                continue  # the reference
            ranks = "one" if strategy == "single" else "all"
            arguments = {"strategy": strategy, "precision": precision}
            advice = f"do not use parallel.strategy={strategy} with {precision} here"
            name = f"train {strategy} {precision}"
            options = {"processes": ranks, "timeout": 240, "advice": advice}
            probes.append(_probe("training", name, "training:training", **arguments, **options))
    return probes


def check_names(only: Sequence[str]) -> None:
    """Raise `UserError` unless each is a group of checks or the name of a check, on this machine or another."""
    known = [*GROUPS, *dict.fromkeys(probe.name for gpus in (0, 2) for probe in all_probes(gpus))]
    for name in only:
        if name not in known:
            hint = did_you_mean(name, known) or f"groups: {', '.join(GROUPS)}"
            raise UserError(f"--only {name}: unknown check; {hint}")


def select(probes: Sequence[Probe], only: Sequence[str]) -> list[Probe]:
    """Return the probes of these groups or names; all if there are none. The run to compare with is kept."""
    chosen = [probe for probe in probes if not only or probe.group in only or probe.name in only]
    if not chosen:
        raise UserError(f"--only {' '.join(only)}: not checked on this machine, or not with --quick")
    if any(probe.group == "training" for probe in chosen):
        first = next(probe for probe in probes if probe.group == "training")
        chosen = chosen if first in chosen else [*chosen, first]
    return sorted(chosen, key=list(probes).index)


def run_doctor(probes: Sequence[Probe], setup: Setup, watcher: Watcher) -> list[Check]:
    """Run `probes` and return their results, by group."""
    found = [(probe.group, check) for probe, checks in run_probes(probes, setup, watcher) for check in checks]
    return [check for group in GROUPS for name, check in found if name == group]


@contextmanager
def scratch_directory() -> Iterator[str]:
    """Yield a temporary directory; files that a killed process still writes do not matter."""
    folder = tempfile.mkdtemp(prefix="vit_scale-doctor-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
