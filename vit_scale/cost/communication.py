"""Bytes each process sends per step, derived from the algorithms.

In a reduce-scatter or all-gather of n bytes over N processes, each process sends (N - 1)/N n bytes; an all-reduce is
one of each. With P parameters, b bytes per element in the compute precision and A gradient accumulation steps:

| ddp   | 2 (N - 1)/N 4P       | one all-reduce of the fp32 gradients                                                  |
| zero1 | 2 (N - 1)/N bP       | gradients are reduce-scattered and weights all-gathered once per step                 |
| zero2 | (A + 1) (N - 1)/N bP | gradients are reduce-scattered after each micro-batch, weights all-gathered once      |
| zero3 | 3A (N - 1)/N bP      | weights all-gathered for each forward and backward pass, gradients reduce-scattered   |

The EMA is sharded and requires no communication; the gradient norm, losses and metrics are a few bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from vit_scale.cost.activations import Precision, number_bytes
from vit_scale.cost.memory import Strategy


@dataclass(frozen=True)
class Communication:
    """Communication per step."""

    sent: int
    """Bytes each process sends; it receives as many."""
    formula: str


def communication(
    strategy: Strategy, *, params: int, processes: int, accumulation: int, precision: Precision
) -> Communication:
    """Return the communication volume of `strategy`; zero for a single process."""
    number = 4 if strategy == "ddp" else number_bytes(precision)
    times, factor, collectives = {
        "ddp": (2, "2", "1 all-reduce"),
        "zero1": (2, "2", "1 reduce-scatter, 1 all-gather"),
        "zero2": (accumulation + 1, "(A+1)", "A reduce-scatters, 1 all-gather"),
        "zero3": (3 * accumulation, "3A", "2A all-gathers, A reduce-scatters"),
    }[strategy]
    sent = times * (processes - 1) / processes * number * params
    return Communication(round(sent), f"{factor} (N-1)/N {number}P: {collectives}")
