"""Peak memory of training: our model vs. timm at the same batch size, and each strategy vs. its prediction.

    python benchmarks/memory.py [--models vit_cifar_small:64 ...] [--cases vit_cifar_base:4 ...] [--json]

The peak is the maximum that torch's allocator has allocated, including model creation; on CPU it is measured with the
profiler. The first rows train both models for three steps in this process, with fused AdamW. For the other rows, two
processes (gloo, or NCCL on GPUs) run three steps of the training loop with DDP and ZeRO-1, -2, -3 and EMA; the baseline
is the prediction of `--dry-run` and launch/report.py for the same run. A block freed by another thread, such as gloo's,
is noticed only when its memory is allocated again, so the process with the smaller peak is used.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from compare import Row, model_and_batch, parser, show
from programs import run_program
from torch import nn
from train_step import build_theirs, step_of

import vit_scale
from vit_scale.cost.measured import peak_bytes
from vit_scale.cost.memory import STRATEGIES, Strategy
from vit_scale.plan.fits import memory_model
from vit_scale.plan.machine import Machine
from vit_scale.recipe import build_config
from vit_scale.report.model_report import report_on

PROCESSES = 2
WITHIN = 0.1
MEGABYTE = 1e6
LIMIT = "activations required by the backward pass, which are the same; skipped branches save none"
PREDICTION_LIMIT = "temporary buffers of torch and DeepSpeed: gathered weights, flattened copies, messages in flight"


def main() -> None:
    """Run the benchmark and print the results."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--models", nargs="+", default=["vit_cifar_small:64", "vit_small_patch16_224:8"])
    options.add_argument("--drop-path", nargs="+", type=float, default=[0.0, 0.1, 0.4])
    options.add_argument("--cases", nargs="+", default=["vit_cifar_small:16", "vit_cifar_512x6:8"])
    args = options.parse_args()
    rows = [compare_with_timm(*model_and_batch(model), rate, args) for model in args.models for rate in args.drop_path]
    for case in args.cases:
        rows += [compare_with_prediction(*model_and_batch(case), strategy, args) for strategy in STRATEGIES]
    show(rows, args)


def compare_with_timm(name: str, batch: int, rate: float, args: argparse.Namespace) -> Row:
    """Compare three steps of each model."""
    ours = peak_bytes(lambda: train(_ours(name, rate), batch, args.device), args.device) / MEGABYTE
    theirs = peak_bytes(lambda: train(build_theirs(name, rate, 10), batch, args.device), args.device) / MEGABYTE
    case, ratio = f"{name}, batch {batch}, drop path {rate:g}", ours / theirs
    return Row(case, ours, theirs, "MB", ratio, ratio, ratio, target=1.0, better="lower", limit=LIMIT)


def _ours(name: str, rate: float) -> nn.Module:
    return vit_scale.create_model(name, num_classes=10, drop_path=rate)


def train(model: Any, batch: int, device: str) -> object:
    """Train three steps on images in memory."""
    torch.manual_seed(0)
    model = model.train().to(device)
    height, width = model.patch_embed.img_size
    images = torch.randn(batch, 3, height, width, device=device)
    step = step_of(model, images, torch.zeros(batch, dtype=torch.long, device=device))
    for _ in range(3):
        step()
    return model, step


def compare_with_prediction(name: str, batch: int, strategy: Strategy, args: argparse.Namespace) -> Row:
    """Compare three steps of a run on two processes with the prediction."""
    tree = recipe(name, batch, strategy)
    measured, expected = measure(tree) / MEGABYTE, predict(tree, strategy, batch) / MEGABYTE
    case, ratio = f"{name}, {batch} images per process, {strategy}: measured vs. predicted", measured / expected
    return Row(
        case, measured, expected, "MB", ratio, ratio, ratio, target=WITHIN, better="near", limit=PREDICTION_LIMIT
    )


def recipe(name: str, batch: int, strategy: str) -> dict[str, Any]:
    """Return the recipe of a run on synthetic images."""
    return {
        "model": {"name": name},
        "data": {"source": "synthetic", "synthetic_images": 256, "synthetic_classes": 10, "workers": 0},
        "schedule": {"steps": 10},
        "batch": {"global": PROCESSES * batch, "micro": batch},
        "ema": {"decay": 0.99},
        "parallel": {"strategy": strategy, "precision": "fp32"},
        "track": {"wandb": "disabled"},
    }


def measure(tree: dict[str, Any]) -> int:
    """Return the peak bytes of the process with the smaller peak."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "recipe.yaml")
        path.write_text(yaml.safe_dump(tree))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
        here = str(Path(__file__).with_name("memory_of_run.py"))
        # Put large blocks on separate pages, so that the memory of a freed block is soon reused by another.
        environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        out = run_program([*launcher, here, str(path), f"run.dir={scratch}/run"], environment)
    return min(json.loads(line)["peak"] for line in out.splitlines() if line.startswith('{"peak"'))


def predict(tree: dict[str, Any], strategy: Strategy, batch: int) -> int:
    """Return the peak bytes predicted by the memory model."""
    config = build_config(tree)
    machine = Machine("CPU", PROCESSES, 2**40, None, "cpu", "fp32")
    model = memory_model(report_on(config, gpus=PROCESSES), machine, config)
    return model.footprint(strategy, batch, accumulation=1).peak


if __name__ == "__main__":
    main()
