"""Bytes each process sends per step, derived from the algorithms.

In a reduce-scatter or all-gather of n bytes over N processes, each process sends (N - 1)/N n bytes; an all-reduce is
one of each. With P parameters and A gradient accumulation steps, in fp32 as everywhere except the weights of zero3:

| ddp   | 2 (N - 1)/N 4P       | one all-reduce of the gradients                                                       |
| zero1 | 2 (N - 1)/N 4P       | gradients are reduce-scattered and weights all-gathered once per step                 |
| zero2 | (A + 1) (N - 1)/N 4P | gradients are reduce-scattered after each micro-batch, weights all-gathered once      |
| zero3 | A (N - 1)/N 12P      | weights all-gathered for each forward and backward pass, gradients reduce-scattered   |
|       | A (N - 1)/N 8P       | in half precision                                                                     |

If only T of them are trained (frozen layers have no backward pass), T takes the place of P, except in the all-gathers
of zero3 for the forward pass: with b bytes per weight, A (N - 1)/N (b(P + T) + 4T).

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
    strategy: Strategy, *, params: int, processes: int, accumulation: int, precision: Precision, frozen: int = 0
) -> Communication:
    """Return the communication volume of `strategy`; zero for a single process. `frozen`: untrained parameters."""
    trained, letter = params - frozen, "T" if frozen else "P"
    weights = number_bytes(precision)
    gathered = f"A (N-1)/N ({weights}P+{weights + 4}T)" if frozen else f"A (N-1)/N {2 * weights + 4}P"
    sent, formula = {
        "ddp": (2 * 4 * trained, f"2 (N-1)/N 4{letter}: 1 all-reduce"),
        "zero1": (2 * 4 * trained, f"2 (N-1)/N 4{letter}: 1 reduce-scatter, 1 all-gather"),
        "zero2": ((accumulation + 1) * 4 * trained, f"(A+1) (N-1)/N 4{letter}: A reduce-scatters, 1 all-gather"),
        "zero3": (
            accumulation * (weights * (params + trained) + 4 * trained),
            f"{gathered}: 2A all-gathers, A reduce-scatters",
        ),
    }[strategy]
    return Communication(round((processes - 1) / processes * sent), formula)
