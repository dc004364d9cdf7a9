"""k-NN equals scikit-learn's, in blocks, and never counts an image as its own neighbor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from vit_scale.errors import UserError
from vit_scale.probe import knn
from vit_scale.probe.knn import TEMPERATURE, knn_predict, usable_neighbors

KS = (1, 10, 20, 100)


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor, Tensor]:
    """Overlapping classes of unequal size: training features with labels, and queries."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(5, 12, generator=generator)
    labels = torch.randint(0, 15, (400,), generator=generator) // 3
    train = centers[labels] + 1.5 * torch.randn(400, 12, generator=generator)
    queries = centers.repeat(30, 1) + 1.5 * torch.randn(150, 12, generator=generator)
    return train, labels, queries


def reference(train: Tensor, labels: Tensor, queries: Tensor, k: int) -> np.ndarray:
    """Votes weighted by the softmax of the similarities of the neighbors, 1 minus the cosine distance."""

    def weights(distances: np.ndarray) -> np.ndarray:
        exponent = np.exp((1 - distances) / TEMPERATURE)
        return exponent / exponent.sum(1, keepdims=True)

    model = KNeighborsClassifier(k, metric="cosine", weights=weights)
    return model.fit(train.double().numpy(), labels.numpy()).predict(queries.double().numpy())


def test_predictions_equal_those_of_scikit_learn(data: tuple[Tensor, Tensor, Tensor]) -> None:
    train, labels, queries = data
    predicted = knn_predict(train, labels, queries, KS, 5)
    for k in KS:
        np.testing.assert_array_equal(predicted[k].numpy(), reference(train, labels, queries, k))
    assert not torch.equal(predicted[1], predicted[100])


def test_features_that_hardly_differ_are_told_apart(data: tuple[Tensor, Tensor, Tensor]) -> None:
    """As those of a model that has hardly learned: in float32 their similarities are all 1."""
    train, labels, queries = data
    near, asked = (1 + 1e-4 * part for part in (train, queries))
    predicted = knn_predict(near, labels, asked, (10,), 5)[10].numpy()
    expected = reference(near, labels, asked, 10)
    assert (predicted == expected).mean() > 0.98
    plain = torch.nn.functional.normalize(asked) @ torch.nn.functional.normalize(near).T
    assert (plain > 1 - 1e-6).all()


def test_blocks_change_nothing(data: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = knn_predict(*data, KS, 5)
    monkeypatch.setattr(knn, "QUERY_BLOCK", 7)
    monkeypatch.setattr(knn, "TRAIN_BLOCK", 33)
    calls: list[None] = []
    blocks = knn_predict(*data, KS, 5, advance=lambda: calls.append(None))
    assert len(calls) == len(knn.query_blocks(150, 5)) == 22
    assert all(torch.equal(whole[k], blocks[k]) for k in KS)


def test_many_classes_mean_small_blocks() -> None:
    assert knn.query_blocks(2000, 100) == [(0, 1024), (1024, 2000)]
    assert max(stop - start for start, stop in knn.query_blocks(2000, 2**21)) == 8


def test_an_image_is_never_its_own_neighbor(
    data: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to fitting scikit-learn's model without the image, for each image; blocks included."""
    train, labels, _ = data
    train, labels = train[:60], labels[:60]
    monkeypatch.setattr(knn, "TRAIN_BLOCK", 13)
    out = knn_predict(train, labels, train, (1, 10), 5, own_Q=torch.arange(60))
    for k in (1, 10):
        others = [torch.arange(60) != i for i in range(60)]
        expected = [reference(train[o], labels[o], train[~o], k)[0] for o in others]
        assert out[k].tolist() == expected
    assert torch.equal(knn_predict(train, labels, train, (1,), 5)[1], labels), "otherwise it is its nearest one"


def test_own_row_is_excluded_only_where_there_is_one(data: tuple[Tensor, Tensor, Tensor]) -> None:
    train, labels, _ = data
    own = torch.tensor([3, -1])
    both = knn_predict(train, labels, train[[3, 4]], (1,), 5, own_Q=own)[1]
    assert both[1] == labels[4]
    assert both[0] == reference(train[torch.arange(400) != 3], labels[torch.arange(400) != 3], train[3:4], 1)[0]


def test_k_that_does_not_fit_is_skipped_by_default_and_an_error_if_requested() -> None:
    assert usable_neighbors(None, 150) == ([10, 20, 100], [200])
    assert usable_neighbors([7], 7) == ([7], [])
    with pytest.raises(UserError, match="--k 8: an image has only 7 other training images"):
        usable_neighbors([3, 8], 7)
    with pytest.raises(UserError, match="at least 10 training images, there are 9; choose a --k"):
        usable_neighbors(None, 9)
