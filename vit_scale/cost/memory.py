"""Memory per GPU for weights, gradients, optimizer state and EMA, under each strategy.

Bytes per parameter on N GPUs, with m optimizer moments (AdamW and LAMB 2, SGD with momentum 1):

|           | DDP | ZeRO                                                              |
| weights   | 4   | 4, stage 3: 4/N                                                   |
|           | + 2 in half precision, except stage 3                             |
| gradients | 4   | 4, stages 2 and 3: 4/N                                            |
| optimizer | 4m  | (4 + 4 + 4m)/N                                                    |
| ema       | 4/N | 4/N                                                               |

Half precision is autocast, whose casts of the weights are kept from the forward to the backward pass; stage 3 casts
them again instead. DeepSpeed's optimizer keeps separate fp32 weights and a flat copy of its shard of the gradients. The
EMA is sharded over the processes. `buffers` are for communication. DDP needs none without accumulation: its gradients
are views of the buckets it reduces. DeepSpeed fills one bucket while it reduces another, and stage 3 keeps up to
`ZERO3_LIVE` gathered weights while it gathers the next bucket of them.
Frozen parameters have weights only, of which autocast caches no copy: all other rows count trained parameters.
Activations, the CUDA context (about 0.5 GiB) and fragmentation are not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from vit_scale.config import Strategy
from vit_scale.cost.activations import Precision
from vit_scale.cost.strategy_names import STRATEGIES

STATE_PARTS = ("weights", "gradients", "optimizer", "ema", "buffers")

# In elements, not bytes. DeepSpeed's own values (5 x 10^8 and 10^9) leave nothing to overlap with, and shard nothing.
ZERO_BUCKET = 50_000_000
ZERO3_LIVE = 100_000_000

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
    """Parameters of the largest block, which ZeRO-3 gathers whatever its limits."""
    frozen: int = 0
    """Parameters that are not trained, of `params`."""


def states_by_strategy(states: States) -> dict[Strategy, dict[str, int]]:
    """Return bytes per GPU: strategy -> part -> bytes."""
    return {strategy: _states(states, strategy) for strategy in STRATEGIES}


def _states(states: States, strategy: Strategy) -> dict[str, int]:
    params, trained = states.params, states.params - states.frozen
    shard, trained_shard = ceil(params / states.gpus), ceil(trained / states.gpus)
    ema = 4 * trained_shard if states.ema else 0
    casts = 0 if states.precision == "fp32" or strategy == "zero3" else 2 * trained
    if strategy == "ddp":
        sizes = (4 * params + casts, 4 * trained, 4 * states.moments * trained, ema, 0)
        return dict(zip(STATE_PARTS, sizes, strict=True))
    weights = 4 * (shard if strategy == "zero3" else params) + casts
    gradients = 4 * (trained if strategy == "zero1" else trained_shard)
    optimizer = (4 + 4 + 4 * states.moments) * trained_shard
    return dict(zip(STATE_PARTS, (weights, gradients, optimizer, ema, _zero_buffers(states, strategy)), strict=True))


def _zero_buffers(states: States, strategy: Strategy) -> int:
    bucket = zero_bucket(states.params - states.frozen)
    if strategy != "zero3":
        return 4 * 2 * bucket
    gathered = min(states.params, ZERO3_LIVE + states.largest_block)
    return 4 * (gathered + 3 * bucket)


def zero_bucket(params: int) -> int:
    """Elements that DeepSpeed communicates at once: a quarter of the trained parameters, so that most of it overlaps.

    An even number, because DeepSpeed aligns its partitions to two elements.
    """
    bucket = min(max(-(-params // 4), 1_000_000), params, ZERO_BUCKET)
    return bucket + bucket % 2


def optimizer_moments(name: str, momentum: float = 0.9) -> int:
    """Optimizer moments per parameter; 2 for the Adam family and unknown optimizers."""
    if name == "sgd" and momentum == 0:
        return 0
    return _MOMENTS.get(name, 2)
