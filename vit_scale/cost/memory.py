"""Memory per GPU for weights, gradients, optimizer state and EMA, under each strategy.

Bytes per parameter on N GPUs, with m optimizer moments (AdamW and LAMB 2, SGD with momentum 1):

|           | half precision, DDP | half precision, ZeRO      | fp32, DDP | fp32, ZeRO                |
| weights   | 4 + 2 (autocast)    | 2, stage 3: 2/N           | 4         | 4, stage 3: 4/N           |
| gradients | 4                   | 2, stages 2 and 3: 2/N    | 4         | 4, stages 2 and 3: 4/N    |
| optimizer | 4m                  | (4 + 4 + 4m)/N            | 4m        | (4 + 4 + 4m)/N            |
| ema       | 4/N                 | 4/N                       | 4/N       | 4/N                       |

Autocast caches a half-precision copy of the weights from the forward to the backward pass. DeepSpeed's optimizer
keeps separate fp32 weights and converts its shard of the gradients to fp32 for the step. The EMA is sharded over the
processes. `buffers` are for communication: DDP reduces gradients in buckets whose total size equals the gradients;
DeepSpeed uses one gradient bucket, as large as the model up to 500 million elements, and stage 3 prefetches weights,
temporarily twice: as received, and assembled.
Activations, the CUDA context (about 0.5 GiB) and fragmentation are not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from vit_scale.config import Strategy
from vit_scale.cost.activations import Precision, number_bytes
from vit_scale.cost.strategy_names import STRATEGIES

STATE_PARTS = ("weights", "gradients", "optimizer", "ema", "buffers")

# DeepSpeed's defaults, in elements (not bytes); a small model uses a smaller reduce bucket, see `zero_reduce_bucket`.
ZERO_REDUCE_BUCKET = 500_000_000
ZERO_PREFETCH_BUCKET = 50_000_000

_MOMENTS = {"sgd": 1, "momentum": 1, "lion": 1, "muon": 1, "rmsprop": 1}


@dataclass(frozen=True)
class States:
    """Properties of a run that determine the size of its states."""

    params: int
    gpus: int = 8
    precision: Precision = "bf16"
    moments: int = 2
    ema: bool = True
    largest_block: int = 0
    """Parameters of the largest block; ZeRO-3 gathers one block at a time."""


def states_by_strategy(states: States) -> dict[Strategy, dict[str, int]]:
    """Return bytes per GPU: strategy -> part -> bytes."""
    return {strategy: _states(states, strategy) for strategy in STRATEGIES}


def _states(states: States, strategy: Strategy) -> dict[str, int]:
    params, shard = states.params, ceil(states.params / states.gpus)
    ema = 4 * shard if states.ema else 0
    if strategy == "ddp":
        autocast = 0 if states.precision == "fp32" else 2
        buckets = 4 * params if states.gpus > 1 else 0
        sizes = ((4 + autocast) * params, 4 * params, 4 * states.moments * params, ema, buckets)
        return dict(zip(STATE_PARTS, sizes, strict=True))
    number = number_bytes(states.precision)
    weights = number * (shard if strategy == "zero3" else params)
    gradients = number * (params if strategy == "zero1" else shard)
    optimizer = (4 + 4 + 4 * states.moments) * shard
    return dict(zip(STATE_PARTS, (weights, gradients, optimizer, ema, _zero_buffers(states, strategy)), strict=True))


def _zero_buffers(states: States, strategy: Strategy) -> int:
    numbers = zero_reduce_bucket(states.params)
    if strategy == "zero3":
        numbers += 2 * min(states.params, states.largest_block + ZERO_PREFETCH_BUCKET)
    return number_bytes(states.precision) * numbers


def zero_reduce_bucket(params: int) -> int:
    """Elements in DeepSpeed's gradient bucket, which it allocates in full: at most the model's parameters."""
    return min(ZERO_REDUCE_BUCKET, params)


def optimizer_moments(name: str, momentum: float = 0.9) -> int:
    """Optimizer moments per parameter; 2 for the Adam family and unknown optimizers."""
    if name == "sgd" and momentum == 0:
        return 0
    return _MOMENTS.get(name, 2)
