"""The order of images is a function of (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest

from vit_scale.data.sampling import EvalIndices, TrainIndices, sample_index, step_positions


def test_every_epoch_has_each_image_once_in_a_new_order() -> None:
    index = sample_index(0, np.arange(300), 100).reshape(3, 100)
    assert np.array_equal(np.sort(index, axis=1), np.tile(np.arange(100), (3, 1)))
    assert not np.array_equal(index[0], index[1])
    assert not np.array_equal(index[0], sample_index(1, np.arange(100), 100))


def test_any_position_is_reached_without_replay() -> None:
    full = sample_index(7, np.arange(1000), 64)
    assert sample_index(7, 777, 64) == full[777]
    assert np.array_equal(sample_index(7, [900, 5, 63, 64], 64), full[[900, 5, 63, 64]])
    assert 0 <= sample_index(7, 10**15, 64) < 64


@pytest.mark.parametrize(("world", "micro"), [(1, 24), (1, 8), (2, 12), (2, 4), (3, 2), (4, 3)])
def test_step_has_the_same_positions_for_any_world_size(world: int, micro: int) -> None:
    parts = [step_positions(5, 24, rank, world, micro) for rank in range(world)]
    assert all(len(batch) == micro for part in parts for batch in part)
    assert np.array_equal(np.concatenate([batch for part in parts for batch in part]), np.arange(120, 144))


def test_batch_that_does_not_divide_is_rejected() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        step_positions(0, 10, 0, 3, 1)
    with pytest.raises(ValueError, match="do not divide"):
        step_positions(0, 12, 0, 2, 4)


def test_repeats_are_in_one_batch_and_not_neighbors() -> None:
    n, repeats = 960, 3
    index = sample_index(0, np.arange(n), n, repeats)
    images, counts = np.unique(index, return_counts=True)
    assert len(images) == n // repeats
    assert set(counts) == {repeats}
    # Neighbors are mixed with each other: a copy mixed with a copy would be wasted.
    assert np.all(index[0::2] != index[1::2])
    batches = index.reshape(-1, 96)
    assert all(np.unique(batch, return_counts=True)[1].min() == repeats for batch in batches)
    # The next epoch has different images.
    assert set(sample_index(0, np.arange(n, 2 * n), n, repeats)) != set(images)


@pytest.mark.parametrize("n", [1, 7, 16, 97, 100])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_has_each_image_once_and_the_same_number_of_batches_per_process(n: int, world: int) -> None:
    ranks = [EvalIndices(images=n, batch=8, rank=rank, world=world) for rank in range(world)]
    assert len({len(list(batches)) for batches in ranks} | {len(batches) for batches in ranks}) == 1
    assert all(len(batch) == 8 for batches in ranks for batch in batches)
    indices = np.concatenate([batch for batches in ranks for batch in batches])
    assert np.array_equal(np.sort(indices[indices >= 0]), np.arange(n))


def test_train_indices_are_the_positions_of_a_process_and_their_images() -> None:
    indices = TrainIndices(
        global_batch=24, micro_batch=4, rank=1, world=2, start_step=2, end_step=5, seed=7, images=50, repeats=1
    )
    batches = list(indices)
    assert len(batches) == len(indices) == 9
    positions = np.concatenate([batch[0] for batch in batches])
    assert np.array_equal(positions, np.concatenate([np.arange(24 * step + 12, 24 * step + 24) for step in (2, 3, 4)]))
    assert np.array_equal(np.concatenate([batch[1] for batch in batches]), sample_index(7, positions, 50))
