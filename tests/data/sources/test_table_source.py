"""Sources that read from tables, and the hold-out of a validation split."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from vit_scale.config import DataConfig
from vit_scale.data.data import open_data
from vit_scale.data.sources.table_source import Source, balanced_holdout


def test_hold_out_is_balanced_and_always_the_same() -> None:
    labels = np.random.default_rng(0).choice(20, 2000, p=np.arange(1, 21) / 210)
    held = balanced_holdout(labels, 0.1)
    assert held.sum() == 200
    excess = np.bincount(labels[held], minlength=20) - 0.1 * np.bincount(labels, minlength=20)
    assert np.abs(excess).max() <= 1
    assert np.array_equal(held, balanced_holdout(labels, 0.1))
    assert balanced_holdout(np.arange(500), 0.1).sum() == 50, "one image per class: 10% of the classes"
    assert balanced_holdout(np.zeros(2, int), 0.9).sum() == 1, "something is left to train on"


def test_source_can_be_sent_to_workers(image_folder: Path) -> None:
    data = open_data(DataConfig(source=str(image_folder)), seed=0)
    data.train.read(0)
    copy = pickle.loads(pickle.dumps(data.train))
    assert isinstance(copy, Source)
    assert copy.read(5) == data.train.read(5)
