"""Even draws of all classes: exact per epoch, without repetition as far as it goes, a function of (seed, position)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from vit_scale.config import DataConfig
from vit_scale.data.class_balance import ClassBalance, class_balance
from vit_scale.data.data import Data
from vit_scale.data.sampling import TrainIndices, sample_index
from vit_scale.data.targets import NoValues
from vit_scale.errors import UserError
from vit_scale.recipe import build_config

COUNTS = np.array([60, 30, 7, 3])
N = COUNTS.sum()
LABELS = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 5], COUNTS))
"""Of the classes 0 to 5, two of which have no image."""
BALANCE = ClassBalance.of_labels(LABELS)


def drawn(positions: object, seed: int = 0, repeats: int = 1) -> np.ndarray:
    return sample_index(seed, positions, N, repeats, BALANCE)


def test_every_epoch_has_each_class_equally_often_in_a_new_order() -> None:
    epochs = drawn(np.arange(3 * N)).reshape(3, N)
    for epoch in epochs:
        assert np.unique(LABELS[epoch], return_counts=True)[1].tolist() == [25, 25, 25, 25]
    assert not np.array_equal(LABELS[epochs[0]], LABELS[epochs[1]])
    assert not np.array_equal(epochs[0], drawn(np.arange(N), seed=1))


def test_class_repeats_an_image_only_after_all_others_also_across_epochs() -> None:
    images = drawn(np.arange(12 * N))
    for label, count in zip([0, 1, 2, 5], COUNTS, strict=True):
        times = np.unique(images[LABELS[images] == label], return_counts=True)[1]
        assert len(times) == count, "each image is drawn"
        assert times.max() - times.min() <= 1


def test_epoch_that_classes_do_not_divide_differs_by_one() -> None:
    balance = ClassBalance.of_labels(np.repeat([0, 1, 2], [5, 4, 1]))
    for epoch in range(3):
        index = sample_index(0, np.arange(10 * epoch, 10 * epoch + 10), 10, balance=balance)
        labels = np.repeat([0, 1, 2], [5, 4, 1])[index]
        assert sorted(np.unique(labels, return_counts=True)[1]) == [3, 3, 4]


def test_any_position_is_reached_without_replay() -> None:
    full = drawn(np.arange(1000))
    assert drawn(777) == full[777]
    assert np.array_equal(drawn([900, 5, 99, 100]), full[[900, 5, 99, 100]])
    assert 0 <= drawn(10**12) < N


@pytest.mark.parametrize("start", [0, 3])
def test_ranks_and_a_resumed_run_draw_the_same_images(start: int) -> None:
    options = {"global_batch": 24, "seed": 7, "images": int(N), "balance": BALANCE}
    one = [images for _, images in TrainIndices(micro_batch=24, end_step=9, **options)][start:]
    ranks = [TrainIndices(micro_batch=4, rank=r, world=2, start_step=start, end_step=9, **options) for r in (0, 1)]
    parts = [np.concatenate([images for _, images in rank]).reshape(-1, 12) for rank in ranks]
    assert np.array_equal(np.concatenate(one), np.concatenate(parts, axis=1).ravel())


def test_repeated_augmentation_repeats_evenly_drawn_images() -> None:
    n = 960
    labels = np.repeat([0, 1, 2, 3], [600, 200, 120, 40])
    index = sample_index(0, np.arange(n), n, 3, ClassBalance.of_labels(labels))
    assert np.unique(labels[index], return_counts=True)[1].tolist() == [240] * 4
    assert all(np.unique(images, return_counts=True)[1].min() >= 3 for images in index.reshape(-1, 96))


def test_classes_of_one_image_each_are_an_ordinary_epoch() -> None:
    balance = ClassBalance.of_labels(np.arange(10))
    assert sorted(sample_index(0, np.arange(40, 50), 10, balance=balance)) == list(range(10))


def test_images_without_classes_cannot_be_balanced(folder_data: Data) -> None:
    unlabeled = dataclasses.replace(folder_data.train, table_targets=NoValues(27))
    assert class_balance(DataConfig(), unlabeled) is None
    with pytest.raises(UserError, match="data.balance = true: the images of this task have no classes"):
        class_balance(DataConfig(balance=True), unlabeled)


def test_stream_cannot_be_balanced() -> None:
    with pytest.raises(UserError, match=r"data.balance = true.*data.streaming=false"):
        build_config({"schedule": {"steps": 1}, "data": {"balance": True, "streaming": True}})


def test_balanced_batches_have_the_labels_of_their_images(folder_data: Data, train_loader: Callable) -> None:
    labels = folder_data.train.labels
    assert labels is not None
    chosen = np.concatenate([np.flatnonzero(labels == label)[:count] for label, count in ((0, 2), (1, 8), (2, 8))])
    keep = folder_data.train.subset(chosen)  # type: ignore[attr-defined]
    balance = ClassBalance.of_labels(keep.labels)
    loader = train_loader(keep, in_chans=3, global_batch=18, micro_batch=18, end_step=2, balance=balance)
    for batch in loader:
        assert np.bincount(batch.target["label"].numpy()).tolist() == [6, 6, 6]
