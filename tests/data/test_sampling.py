"""The order of images is a function of (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest

from vit_scale.data.sampling import eval_places, sample_index, step_positions


def test_every_epoch_has_each_image_once_in_an_order_of_its_own() -> None:
    index = sample_index(0, np.arange(300), 100).reshape(3, 100)
    assert np.array_equal(np.sort(index, axis=1), np.tile(np.arange(100), (3, 1)))
    assert not np.array_equal(index[0], index[1])
    assert not np.array_equal(index[0], sample_index(1, np.arange(100), 100))


def test_any_position_is_reached_without_replay() -> None:
    whole = sample_index(7, np.arange(1000), 64)
    assert sample_index(7, 777, 64) == whole[777]
    assert np.array_equal(sample_index(7, [900, 5, 63, 64], 64), whole[[900, 5, 63, 64]])
    assert 0 <= sample_index(7, 10**15, 64) < 64


@pytest.mark.parametrize(("world", "micro"), [(1, 24), (1, 8), (2, 12), (2, 4), (3, 2), (4, 3)])
def test_a_step_is_the_same_positions_however_it_is_shared(world: int, micro: int) -> None:
    shares = [step_positions(5, 24, rank, world, micro) for rank in range(world)]
    assert all(len(batch) == micro for share in shares for batch in share)
    assert np.array_equal(np.concatenate([batch for share in shares for batch in share]), np.arange(120, 144))


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        step_positions(0, 10, 0, 3, 1)
    with pytest.raises(ValueError, match="do not divide"):
        step_positions(0, 12, 0, 2, 4)


def test_repeats_are_copies_in_one_batch_that_are_not_neighbours() -> None:
    n, repeats = 960, 3
    index = sample_index(0, np.arange(n), n, repeats)
    images, counts = np.unique(index, return_counts=True)
    assert len(images) == n // repeats
    assert set(counts) == {repeats}
    # Neighbours are mixed with each other: a copy mixed with a copy would be wasted.
    assert np.all(index[0::2] != index[1::2])
    batches = index.reshape(-1, 96)
    assert all(np.unique(batch, return_counts=True)[1].min() == repeats for batch in batches)
    # Another epoch begins with other images.
    assert set(sample_index(0, np.arange(n, 2 * n), n, repeats)) != set(images)


@pytest.mark.parametrize("n", [1, 7, 16, 97, 100])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_has_each_image_once_and_equally_many_batches_everywhere(n: int, world: int) -> None:
    ranks = [eval_places(n, 8, rank, world) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(batch) == 8 for batches in ranks for batch in batches)
    places = np.concatenate([batch for batches in ranks for batch in batches])
    assert np.array_equal(np.sort(places[places >= 0]), np.arange(n))
