"""What each process sends in one update, as the algorithms have it.

A reduce-scatter or an all-gather of n bytes over N processes sends (N - 1)/N n bytes from each; an all-reduce is one of
each. With P parameters, b bytes a number in the compute precision, and A forward passes an update:

| ddp   | 2 (N - 1)/N 4P       | one all-reduce of gradients, which are fp32                                          |
| zero1 | 2 (N - 1)/N bP       | gradients are reduce-scattered, weights all-gathered, once an update                 |
| zero2 | (A + 1) (N - 1)/N bP | gradients are reduce-scattered after each forward pass, weights all-gathered once    |
| zero3 | 3A (N - 1)/N bP      | weights all-gathered for each forward and backward pass, gradients after each        |

The moving average is sharded and sends nothing; the gradient norm, losses and metrics are a few bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from vit_scale.cost.activations import Precision, number_bytes
from vit_scale.cost.memory import Strategy


@dataclass(frozen=True)
class Communication:
    """Of one update."""

    sent: int
    """Bytes that each process sends, and as many that it receives."""
    formula: str


def communication(
    strategy: Strategy, *, params: int, processes: int, accumulation: int, precision: Precision
) -> Communication:
    """What `strategy` sends; nothing on one process."""
    number = 4 if strategy == "ddp" else number_bytes(precision)
    times, factor, words = {
        "ddp": (2, "2", "an all-reduce"),
        "zero1": (2, "2", "a reduce-scatter, an all-gather"),
        "zero2": (accumulation + 1, "(A+1)", "A reduce-scatters, an all-gather"),
        "zero3": (3 * accumulation, "3A", "2A all-gathers, A reduce-scatters"),
    }[strategy]
    sent = times * (processes - 1) / processes * number * params
    return Communication(round(sent), f"{factor} (N-1)/N {number}P: {words}")
