"""Training step and peak memory of each kind of attention vs. full attention, at several numbers of tokens.

    python benchmarks/attention_kinds.py [--rounds 5] [--tokens 196 1024 4096] [--blocks 2] [--json]

Forward, backward and AdamW step of two blocks of ViT-S (width 384, 6 heads, one class token), all kinds alternately in
one process. From 1,024 tokens on, the target is the ratio of the training FLOPs of both models plus 0.1. Peak memory is
the maximum that torch's allocator has allocated in three steps. No kernel keeps an N x N matrix for the backward pass,
so memory is about the same for all kinds; `explicit` is full attention that does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from compare import Row, compare, interleave, parser, seconds, show
from torch import nn
from train_step import step_of

from vit_scale.cost.count import count_model
from vit_scale.cost.measured import peak_bytes
from vit_scale.models import create_model

KINDS: dict[int, dict[str, dict[str, Any]]] = {
    196: {"window": {"window": 7}, "dilated": {"dilation": 2}, "block": {"window": 2}, "linear": {}},
    1024: {"window": {"window": 16}, "dilated": {"dilation": 2}, "block": {"window": 8}, "linear": {}},
    4096: {"window": {"window": 16}, "dilated": {"dilation": 4}, "block": {"window": 4}, "linear": {}},
}
"""Options by number of tokens: groups of 256 patches, or of 49 (block: 28) at 196."""
BATCH = {196: 16, 1024: 4, 4096: 1}
MUST_PAY_FROM = 1024
TOLERANCE = 0.1
MEMORY_TOLERANCE = 0.05
MEGABYTE = 1e6
LIMIT = "the rest of a step, which is the same for all kinds: linear layers, norms and GELU"
MEMORY_LIMIT = "activations that all kinds keep; the kernel for full attention keeps no N x N matrix either"


def main() -> None:
    """Run the benchmark and print the results."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--tokens", nargs="+", type=int, default=list(KINDS), choices=list(KINDS))
    options.add_argument("--blocks", type=int, default=2, help="(default: %(default)s)")
    args = options.parse_args()
    show([row for tokens in args.tokens for row in measure(tokens, args)], args)


def build(kind: str, tokens: int, blocks: int) -> nn.Module:
    """Return the model of a kind; its head reads all patches, so that the last block computes them."""
    torch.manual_seed(0)
    full: dict[str, dict[str, Any]] = {"full": {}, "explicit": {"kernel": "explicit"}}
    chosen = full[kind] if kind in full else {"attention": kind, **KINDS[tokens][kind]}
    common: dict[str, Any] = {"img_size": 16 * isqrt(tokens), "depth": blocks, "num_classes": 10, "pool": "mean"}
    return create_model("vit_small_patch16_224", **common, **chosen).train()


def step_for(model: Any, tokens: int, device: str) -> Callable[[], object]:
    """Return a training step on images in memory."""
    batch, side = BATCH[tokens], 16 * isqrt(tokens)
    images, labels = torch.randn(batch, 3, side, side, device=device), torch.zeros(batch, dtype=torch.long)
    return step_of(model.to(device), images, labels.to(device))


def measure(tokens: int, args: argparse.Namespace) -> list[Row]:
    """Return a row of time and a row of memory for each kind."""
    models = {kind: build(kind, tokens, args.blocks) for kind in ("full", *KINDS[tokens])}
    flops = {kind: count_model(model).train_flops_per_image() for kind, model in models.items()}
    steps = {kind: step_for(model, tokens, args.device) for kind, model in models.items()}

    def milliseconds(step: Callable[[], object]) -> Callable[[], float]:
        return lambda: 1e3 * seconds(step, args.device)

    values = interleave({kind: milliseconds(step) for kind, step in steps.items()}, args.rounds, warmup=1)
    del models, steps
    peaks = {kind: peak(kind, tokens, args) for kind in (*flops, "explicit")}
    rows = []
    for kind in KINDS[tokens]:
        name, predicted = f"{tokens:,} tokens, {kind}", flops[kind] / flops["full"]
        must_pay = tokens >= MUST_PAY_FROM
        row = compare(f"{name}: step", values, kind, "full", "ms", better="lower", limit=LIMIT)
        target = round(min(predicted + TOLERANCE, 1.0), 2) if must_pay else None
        rows.append(replace(row, target=target, more={"of the FLOPs of full attention": predicted}))
        ratio = peaks[kind] / peaks["full"]
        rows.append(
            Row(
                f"{name}: memory",
                peaks[kind],
                peaks["full"],
                "MB",
                *(ratio, ratio, ratio),
                target=1 + MEMORY_TOLERANCE if must_pay else None,
                better="lower",
                limit=MEMORY_LIMIT,
                more={"MB for full attention with model.kernel=explicit": peaks["explicit"]},
            )
        )
    return rows


def peak(kind: str, tokens: int, args: argparse.Namespace) -> float:
    """Return the peak memory of three steps, including the model, in MB."""

    def train() -> object:
        step = step_for(build(kind, tokens, args.blocks), tokens, args.device)
        for _ in range(3):
            step()
        return step

    return peak_bytes(train, args.device) / MEGABYTE


if __name__ == "__main__":
    main()
