"""Ten steps of a tiny model under each strategy and precision, compared with fp32 on one process, and resumed.

Every function here runs on all ranks, and the result of rank 0 counts.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from vit_scale.doctor.check import Check, Setup, broken, largest, skipped, works
from vit_scale.errors import UserError
from vit_scale.launcher import world_size
from vit_scale.recipe import build_config
from vit_scale.strategies.precision import resolve_precision
from vit_scale.strategies.processes import restored_process, wait_for_all
from vit_scale.train.run_recipe import train_recipe

STEPS, SAVED_STEP, GLOBAL_BATCH = 10, 5, 64
TOLERANCES = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 1e-2}
"""Largest difference of a loss, and largest relative difference of a gradient norm, from fp32 on one process."""
REFERENCE = "reference"
RECIPE = {
    # Wide enough for matmuls by the kernels that larger models use.
    "model": {
        "name": "vit_mu",
        "img_size": 8,
        "patch_size": 2,
        "embed_dim": 192,
        "num_heads": 3,
        "depth": 2,
        "layer_scale": 1e-4,
    },
    "data": {"source": "embedded:digits", "workers": 0},
    "augment": {"rand_augment": "rand-m9-mstd0.5-inc1", "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1},
    "schedule": {"steps": STEPS, "warmup_steps": 3},
    "ema": {"decay": 0.9},
    "run": {"log_every": 1, "eval_every": 1000, "save_every": SAVED_STEP},
    "track": {"wandb": "disabled", "images": "never"},
}


def reference(setup: Setup) -> Check:
    """Train in fp32 on one process of the CPU, for the others to be compared with."""
    folder = _folder(setup, REFERENCE)
    _train(setup, folder, "ddp", "fp32")
    found: dict[str, Any] = _metrics(folder)
    if not all(map(math.isfinite, [*found["train/loss"], *found["train/grad_norm"]])):
        return broken("train CPU fp32", "a loss or gradient is not finite", "reinstall torch; report this CPU")
    if problem := resume_problem(setup, folder, "ddp", "fp32"):
        return broken("train CPU fp32", problem, "do not rely on checkpoints; report this machine")
    value = f"{STEPS} steps on one process, loss {found['train/loss'][-1]:.4f}; resumes bit-exactly"
    return works("train CPU fp32", value, **found)


def training(setup: Setup, strategy: str, precision: str) -> Check:
    """Train with a strategy in a precision, compare every loss and gradient norm, save, and resume."""
    name = check_name(strategy, precision)
    if reason := why_not(setup, strategy, precision):
        return skipped(name, reason)
    theirs = _folder(setup, REFERENCE) / "metrics.jsonl"
    if not theirs.exists():
        return skipped(name, "there is no fp32 run on one process to compare with")
    folder = _folder(setup, f"{strategy}-{precision}")
    setup.stage("training")
    _train(setup, folder, strategy, precision)
    loss, norm = differences(_metrics(folder), _metrics(theirs.parent))
    numbers: dict[str, Any] = {"loss_difference": loss, "norm_difference": norm, "tolerance": TOLERANCES[precision]}
    if not max(loss, norm) <= TOLERANCES[precision]:
        value = f"loss differs by {loss:.0e}, gradient norm by {norm:.0e} from fp32 on one process"
        advice = f"do not train with parallel.strategy={_strategy(strategy)} parallel.precision={precision} here"
        return broken(name, value, advice, **numbers)
    setup.stage("resuming")
    if problem := resume_problem(setup, folder, strategy, precision):
        return broken(name, problem, "a resumed run differs from an uninterrupted one; report this machine", **numbers)
    value = f"loss and gradient norm within {max(loss, norm):.0e} of fp32 on one process; resumes bit-exactly"
    return works(name, value, **numbers)


def check_name(strategy: str, precision: str) -> str:
    """Return the name of the check: `train zero2 bf16`."""
    return f"train {strategy} {precision}"


def why_not(setup: Setup, strategy: str, precision: str) -> str | None:
    """Return why this machine cannot train so, if it cannot."""
    if strategy == "ddp" and setup.gpus == 1:
        return "one GPU"
    if strategy.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    try:
        resolve_precision(cast(Any, precision), torch.device(setup.device))
    except UserError as error:
        return str(error).splitlines()[0].partition(": ")[2].split(";")[0].rstrip(".")
    return None


def differences(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> tuple[float, float]:
    """Return the largest difference of a loss, and the largest relative difference of a gradient norm."""
    if any(len(ours[key]) != len(theirs[key]) for key in theirs):
        return math.inf, math.inf
    losses = zip(ours["train/loss"], theirs["train/loss"], strict=True)
    norms = zip(ours["train/grad_norm"], theirs["train/grad_norm"], strict=True)
    return largest(abs(a - b) for a, b in losses), largest(abs(a - b) / b for a, b in norms)


def resume_problem(setup: Setup, folder: Path, strategy: str, precision: str) -> str | None:
    """Resume a finished run from its checkpoint in another directory; return how its weights differ, if they do."""
    resumed = folder.with_name(f"{folder.name}-resumed")
    checkpoint = folder / "checkpoints" / f"step-{SAVED_STEP:08d}"
    _train(setup, resumed, strategy, precision, resume=str(checkpoint))
    for file in ("model.safetensors", "model_ema.safetensors"):
        ours, theirs = load_file(resumed / file), load_file(folder / file)
        wrong = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        if wrong:
            return f"a resumed run has other weights: {len(wrong)} of {len(theirs)} tensors in {file}"
    return None


def _train(setup: Setup, folder: Path, strategy: str, precision: str, resume: str = "auto") -> None:
    """Train on all ranks; raises what stopped it."""
    # The same global batch on one rank and on all, in two micro-batches.
    batch = -(-GLOBAL_BATCH // (2 * setup.processes)) * 2 * setup.processes
    options = [
        f"parallel.strategy={_strategy(strategy)}",
        f"parallel.precision={precision}",
        "parallel.tf32=false",  # fp32 is compared up to rounding
        f"batch.global={batch}",
        f"batch.micro={batch // (2 * world_size())}",
        f"run.dir={folder}",
        f"run.resume={resume}",
    ]
    torch.backends.cudnn.deterministic = True  # The patch embedding's gradient is otherwise added up in any order.
    with restored_process():
        outcome = train_recipe(build_config(dict(RECIPE), options), "doctor")
        wait_for_all()  # Rank 0 writes the final weights.
    if outcome.status:
        raise RuntimeError(f"training ended with status {outcome.status}")


def _strategy(name: str) -> str:
    """Return the option; `single` is DDP on one process."""
    return "ddp" if name == "single" else name


def _folder(setup: Setup, name: str) -> Path:
    return Path(setup.scratch) / "training" / name


def _metrics(folder: Path) -> dict[str, list[float]]:
    """Return the losses and gradient norms of a run, by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found: dict[str, list[float]] = {"train/loss": [], "train/grad_norm": []}
    for line in lines:
        for key, values in found.items():
            if key in line:
                values.append(math.nan if line[key] is None else line[key])
    return found
