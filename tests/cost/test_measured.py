"""The peak of memory, from what torch's allocator did."""

from __future__ import annotations

import pytest
import torch

from vit_scale.cost.measured import peak_bytes, peak_of

MB = 2**20


@pytest.mark.parametrize(
    ("events", "peak"),
    [
        ([(0, 10), (10, 20), (0, -10), (30, 5)], 30),
        ([(0, 10), (0, 10), (0, 10)], 10),  # Freed unseen, and the place taken again.
        ([(100, 50), (0, 10), (90, 20), (40, 10)], 60),  # The new block reaches into one that must be gone.
        ([(100, 50), (120, 10), (160, 10)], 50),  # It lies within that one.
        ([(0, 10), (10, 10), (20, 10), (5, 20)], 30),  # It takes the place of three.
        ([(0, 10), (10, 10)], 20),  # Neighbours.
        ([(50, -7), (0, 10)], 10),  # A block from before.
        ([], 0),
    ],
)
def test_blocks_that_were_freed_unseen_are_gone_when_their_place_is_taken(events: list, peak: int) -> None:
    assert peak_of(events) == peak


def test_a_peak_on_the_cpu_is_that_of_the_tensors_alive_at_once() -> None:
    def work() -> torch.Tensor:
        for _ in range(3):
            first = torch.empty(2 * MB, dtype=torch.uint8)
            del first
        return torch.empty(3 * MB, dtype=torch.uint8)

    assert peak_bytes(work) == 3 * MB
