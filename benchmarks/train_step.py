"""A training step of our model beside timm's: the same weights, images, loss and optimizer.

    python benchmarks/train_step.py [--rounds 4] [--models vit_cifar_small:64 ...] [--drop-path 0 0.1 0.4] [--json]

A step is forward, cross entropy, backward and fused AdamW on a batch that stays in memory. Without stochastic depth
both sides must give the same loss and the same gradients before anything is timed. Rates of stochastic depth rise from
block to block, as timm's and our default do, so that their mean is half of what is named; and again they are the same
in all blocks. The share of the peak counts the FLOPs of timm's step, which leaves nothing out, against a matrix product
measured in the same run; what we leave out may lift it above what the matrix products themselves reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from side_by_side import (
    Row,
    compare,
    interleave,
    matmul_gflops,
    model_and_batch,
    parser,
    seconds,
    show,
    with_shares_of_peak,
)
from timm.layers import DropPath
from torch import nn

import vit_scale
from vit_scale.models.timm_models import counterpart_options
from vit_scale.models.variants import VARIANTS

GOALS = {0.0: 1.00, 0.1: 1.12, 0.4: 1.45}
LIMIT = (
    "matrix products, the same on both sides but for those left out: of the last block all but keys and values of "
    "the tokens that the head does not read, and what stochastic depth drops (5 % and 20 % of the branches where "
    "rates rise to 0.1 and 0.4, 10 % and 40 % where they are uniform). In ViT-S/16 leaving out can give 1.08, 1.13 "
    "and 1.32, or 1.19 and 1.78 where they are uniform. The rest is who multiplies: for us oneDNN, for timm MKL, which "
    "on an AMD EPYC takes no AVX-512 and reaches half of the peak (nine tenths where AVX2 is all there is); attention, "
    "for which see attention.py; and in vit_cifar_small dropout, whose random numbers are a quarter of timm's step. Of "
    "our own step of ViT-S/16 products are three quarters, attention a tenth, and copies that turn weights and "
    "activations around a twentieth"
)
Schedule = Literal["linear", "uniform"]


def main() -> None:
    """Parse, measure, print."""
    options = parser(__doc__, rounds=4)
    options.add_argument("--models", nargs="+", default=["vit_cifar_small:64", "vit_small_patch16_224:16"])
    options.add_argument("--drop-path", nargs="+", type=float, default=list(GOALS))
    args = options.parse_args()
    peak = matmul_gflops(args.device)
    rows = []
    for model in args.models:
        name, batch = model_and_batch(model)
        for rate in args.drop_path:
            schedules: list[Schedule] = ["linear", "uniform"] if rate else ["uniform"]
            rows += [measure(name, batch, rate, schedule, peak, args) for schedule in schedules]
    show(rows, args, [f"a matrix product: {peak:.0f} GFLOP/s"])


def measure(name: str, batch: int, rate: float, schedule: Schedule, peak: float, args: Any) -> Row:
    """Images per second of both sides."""
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
        goal=GOALS.get(rate),
        limit=LIMIT,
    )
    return with_shares_of_peak(row, ours, peak)


def build(name: str, rate: float, schedule: Schedule, device: str) -> tuple[Any, nn.Module]:
    """Both models with the same weights."""
    torch.manual_seed(0)
    ours: Any = vit_scale.create_model(name, num_classes=10, drop_path=rate, drop_path_schedule=schedule).to(device)
    theirs: Any = build_theirs(name, rate, num_classes=10)
    theirs.load_state_dict(ours.state_dict())
    if rate and schedule == "uniform":
        for block in theirs.blocks:
            block.drop_path1, block.drop_path2 = DropPath(rate), DropPath(rate)
    return ours, theirs.to(device)


def build_theirs(name: str, rate: float, num_classes: int, **changes: Any) -> nn.Module:
    """timm's model of that name, or its class with the sizes of a variant that only we have a name for."""
    import timm

    if name in timm.list_models():
        return timm.create_model(name, num_classes=num_classes, drop_path_rate=rate, **changes)
    options = counterpart_options(replace(VARIANTS[name], num_classes=num_classes, **changes))
    return timm.models.VisionTransformer(**options, drop_path_rate=rate)


def check_same(ours: nn.Module, theirs: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Stop if the two do not compute the same loss and gradients, of a few images and with nothing dropped."""
    few, losses = slice(4), []
    for model in (ours.eval(), theirs.eval()):
        loss = F.cross_entropy(model(images[few]), labels[few])
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-4, f"not the same model: losses {losses}"
    their_parameters = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, their_parameters[name].grad, atol=1e-4, rtol=1e-3, msg=name)
    for model in (ours.train(), theirs.train()):
        model.zero_grad()


def step_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """A step of training."""
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
