"""Memory of one GPU for weights, gradients, optimiser and moving average, under each strategy.

Bytes for each parameter, on N GPUs, with m moments of the optimiser (AdamW and LAMB 2, SGD with momentum 1):

|           | half precision, DDP | half precision, ZeRO      | fp32, DDP | fp32, ZeRO                |
| weights   | 4 + 2 (autocast)    | 2, stage 3: 2/N           | 4         | 4, stage 3: 4/N           |
| gradients | 4                   | 2, stages 2 and 3: 2/N    | 4         | 4, stages 2 and 3: 4/N    |
| optimiser | 4m                  | (4 + 4 + 4m)/N            | 4m        | (4 + 4 + 4m)/N            |
| ema       | 4/N                 | 4/N                       | 4/N       | 4/N                       |

Autocast keeps a copy of the weights in half precision from the forward to the backward pass. DeepSpeed's optimiser
keeps weights of its own in fp32, and makes its share of the gradients fp32 for the update. The moving average is
sharded over the processes. `buffers` are what communication needs: DDP reduces gradients in buckets that together
are as large as all of them; DeepSpeed has one bucket for gradients, as large as the model up to 500 million numbers,
and stage 3 gathers weights ahead of their use, twice for a moment: as they arrive, and put together.
Activations, the CUDA context (about 0.5 GiB) and fragmentation come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from vit_scale.config import Strategy
from vit_scale.cost.activations import Precision, number_bytes
from vit_scale.cost.strategy_names import STRATEGIES

STATE_PARTS = ("weights", "gradients", "optimiser", "ema", "buffers")

# DeepSpeed's defaults, in numbers (not bytes); of the first a small model takes less, see `zero_reduce_bucket`.
ZERO_REDUCE_BUCKET = 500_000_000
ZERO_PREFETCH_BUCKET = 50_000_000

_MOMENTS = {"sgd": 1, "momentum": 1, "lion": 1, "muon": 1, "rmsprop": 1}


@dataclass(frozen=True)
class States:
    """What is known of the states of a run."""

    params: int
    gpus: int = 8
    precision: Precision = "bf16"
    moments: int = 2
    ema: bool = True
    largest_block: int = 0
    """Parameters of the largest block, which ZeRO-3 gathers to use it."""


def states_by_strategy(states: States) -> dict[Strategy, dict[str, int]]:
    """Bytes on each GPU: strategy -> part -> bytes."""
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
    optimiser = (4 + 4 + 4 * states.moments) * shard
    return dict(zip(STATE_PARTS, (weights, gradients, optimiser, ema, _zero_buffers(states, strategy)), strict=True))


def _zero_buffers(states: States, strategy: Strategy) -> int:
    numbers = zero_reduce_bucket(states.params)
    if strategy == "zero3":
        numbers += 2 * min(states.params, states.largest_block + ZERO_PREFETCH_BUCKET)
    return number_bytes(states.precision) * numbers


def zero_reduce_bucket(params: int) -> int:
    """Numbers in DeepSpeed's bucket of gradients, which it allocates whole: no more than the model has."""
    return min(ZERO_REDUCE_BUCKET, params)


def optimiser_moments(name: str, momentum: float = 0.9) -> int:
    """Numbers that an optimiser remembers for each parameter; 2 for the Adam family and what is not known here."""
    if name == "sgd" and momentum == 0:
        return 0
    return _MOMENTS.get(name, 2)
