"""Training step of our model vs. timm: the same weights, images, loss and optimizer.

    python benchmarks/train_step.py [--rounds 4] [--models vit_cifar_small:64 ...] [--drop-path 0 0.1 0.4] [--json]

A step is forward, cross entropy, backward and fused AdamW on a batch in memory. Before timing, both sides are checked
to give the same loss and gradients without stochastic depth. Drop path rates are measured with the linear schedule, the
default of timm and vit_scale, whose mean is half of the given rate, and with a uniform schedule. MFU is computed from
the FLOPs of timm's step, which skips nothing, relative to a matmul measured in the same run; skipped compute can
therefore raise our MFU above the actual matmul utilization.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from compare import (
    Row,
    compare,
    interleave,
    matmul_gflops,
    model_and_batch,
    parser,
    seconds,
    show,
    with_mfu,
)
from timm.layers import DropPath
from torch import nn

import vit_scale
from vit_scale.models.timm_models import counterpart_options
from vit_scale.models.variants import VARIANTS

TARGETS = {0.0: 1.00, 0.1: 1.12, 0.4: 1.45}
LIMIT = (
    "matmuls, the same on both sides except for the skipped ones: in the last block everything except keys and values "
    "for tokens that the head does not read, and the branches dropped by stochastic depth (5% and 20% for linear rates "
    "up to 0.1 and 0.4, 10% and 40% for uniform rates). In ViT-S/16, skipping alone can give 1.08x, 1.13x and 1.32x, "
    "or 1.19x and 1.78x with uniform rates. The rest is due to the matmul library (ours: oneDNN; timm: MKL, which does "
    "not use AVX-512 on AMD EPYC and reaches half of the peak, or 90% if limited to AVX2), attention (see "
    "attention_kernel.py), and dropout in vit_cifar_small, whose random numbers take 25% of timm's step. In our own "
    "step of ViT-S/16, matmuls take 75% of the time, attention 10%, and transposed copies 5%"
)
Schedule = Literal["linear", "uniform"]


def main() -> None:
    """Run the benchmark and print the results."""
    options = parser(__doc__, rounds=4)
    options.add_argument("--models", nargs="+", default=["vit_cifar_small:64", "vit_small_patch16_224:16"])
    options.add_argument("--drop-path", nargs="+", type=float, default=list(TARGETS))
    args = options.parse_args()
    peak = matmul_gflops(args.device)
    rows = []
    for model in args.models:
        name, batch = model_and_batch(model)
        for rate in args.drop_path:
            schedules: list[Schedule] = ["linear", "uniform"] if rate else ["uniform"]
            rows += [measure(name, batch, rate, schedule, peak, args) for schedule in schedules]
    show(rows, args, [f"Matmul: {peak:.0f} GFLOP/s"])


def measure(name: str, batch: int, rate: float, schedule: Schedule, peak: float, args: Any) -> Row:
    """Measure the images/s of both sides."""
    ours, theirs = build(name, rate, schedule, args.device)
    images = torch.randn(batch, 3, *ours.img_size, device=args.device)
    labels = torch.randint(0, ours.num_classes, (batch,), device=args.device)
    check_same(ours, theirs, images, labels)
    steps = {"ours": step_of(ours, images, labels), "timm": step_of(theirs, images, labels)}
    sides = {side: rate_of(step, batch, args.device) for side, step in steps.items()}
    values = interleave(sides, args.rounds, warmup=2)
    row = compare(
        f"{name}, batch {batch}, drop path {rate:g}{f', {schedule}' if rate else ''}",
        values,
        "ours",
        "timm",
        "images/s",
        target=TARGETS.get(rate),
        limit=LIMIT,
    )
    return with_mfu(row, ours, peak)


def build(name: str, rate: float, schedule: Schedule, device: str) -> tuple[Any, nn.Module]:
    """Build both models with the same weights."""
    torch.manual_seed(0)
    ours: Any = vit_scale.create_model(name, num_classes=10, drop_path=rate, drop_path_schedule=schedule).to(device)
    theirs: Any = build_theirs(name, rate, num_classes=10)
    theirs.load_state_dict(ours.state_dict())
    if rate and schedule == "uniform":
        for block in theirs.blocks:
            block.drop_path1, block.drop_path2 = DropPath(rate), DropPath(rate)
    return ours, theirs.to(device)


def build_theirs(name: str, rate: float, num_classes: int, **changes: Any) -> nn.Module:
    """Build the timm model `name`, or timm's class with the shape of a variant that exists only in vit_scale."""
    import timm

    if name in timm.list_models():
        return timm.create_model(name, num_classes=num_classes, drop_path_rate=rate, **changes)
    options = counterpart_options(replace(VARIANTS[name], num_classes=num_classes, **changes))
    return timm.models.VisionTransformer(**options, drop_path_rate=rate)


def check_same(ours: nn.Module, theirs: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Assert that both compute the same loss and gradients on a few images, without stochastic depth."""
    few, losses = slice(4), []
    for model in (ours.eval(), theirs.eval()):
        loss = F.cross_entropy(model(images[few]), labels[few])
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-4, f"models differ: losses {losses}"
    their_parameters = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, their_parameters[name].grad, atol=1e-4, rtol=1e-3, msg=name)
    for model in (ours.train(), theirs.train()):
        model.zero_grad()


def step_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """Return a training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def rate_of(step: Callable[[], None], batch: int, device: str) -> Callable[[], float]:
    return lambda: batch / seconds(step, device)


if __name__ == "__main__":
    main()
