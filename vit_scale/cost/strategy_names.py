"""Names of the strategies, as options, labels and sentences. `config.Strategy` lists the options."""

from __future__ import annotations

from typing import get_args

from vit_scale.config import Strategy

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
LABELS: dict[str, str] = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
DESCRIPTIONS = {
    "single": "single process",
    "ddp": "DDP: everything is replicated",
    "zero1": "DeepSpeed ZeRO-1: optimizer state is sharded",
    "zero2": "DeepSpeed ZeRO-2: optimizer state and gradients are sharded",
    "zero3": "DeepSpeed ZeRO-3: optimizer state, gradients and weights are sharded",
}
_OFFLOADED = {"none": "", "optimizer": ", optimizer in host memory", "params": ", optimizer and weights in host memory"}


def format_strategy(strategy: str, offload: str) -> str:
    """Describe a strategy and what it keeps in host memory."""
    return DESCRIPTIONS[strategy] + _OFFLOADED[offload]
