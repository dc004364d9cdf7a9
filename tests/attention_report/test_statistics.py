"""Statistics of attention weights against closed forms: of identity, uniform and one-token attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vit_scale.attention_report import statistics as stats

PREFIX, GRID, PATCH = 2, (3, 4), (8, 16)
N = PREFIX + GRID[0] * GRID[1]


def identity(images: int = 2, heads: int = 3) -> torch.Tensor:
    return torch.eye(N).expand(images, heads, N, N)


def uniform(images: int = 2, heads: int = 3) -> torch.Tensor:
    return torch.full((images, heads, N, N), 1 / N)


def random_weights(images: int = 2, heads: int = 3) -> torch.Tensor:
    return torch.randn(images, heads, N, N, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)


def distances() -> torch.Tensor:
    return stats.patch_distances(GRID, PATCH)


def test_patch_distances_are_those_between_centers_in_pixels() -> None:
    found = distances()
    assert found.shape == (12, 12)
    assert found[0, 1] == 16, "one column to the right"
    assert found[0, 4] == 8, "one row down"
    assert found[1, 11] == pytest.approx(math.hypot(2 * 8, 2 * 16))


def test_distance_is_zero_for_identity_and_the_grid_mean_for_uniform_attention() -> None:
    torch.testing.assert_close(stats.attention_distance(identity(), distances()), torch.zeros(2, 3))
    expected = distances().mean().expand(2, 3)
    torch.testing.assert_close(stats.attention_distance(uniform(), distances()), expected)


def test_distance_is_the_mean_over_queries_without_prefix_tokens() -> None:
    """Against a loop: each row is normalized without prefix tokens; the sum over keys is averaged over queries."""
    weights, places = random_weights().double(), distances().double()
    found = stats.attention_distance(weights, places)
    expected = np.zeros((2, 3))
    for b, h in np.ndindex(2, 3):
        rows = [weights[b, h, i, PREFIX:] for i in range(PREFIX, N)]
        expected[b, h] = np.mean([float((row / row.sum() * places[i]).sum()) for i, row in enumerate(rows)])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_patches_that_attend_to_prefix_tokens_only_have_no_distance() -> None:
    weights = torch.zeros(1, 1, N, N)
    weights[..., 0] = 1
    assert stats.attention_distance(weights, distances()).item() == 0
    weights[0, 0, PREFIX] = torch.eye(N)[PREFIX + 1]
    assert stats.attention_distance(weights, distances()).item() == 16, "the only row with a place"


def test_entropy_is_zero_for_identity_and_one_for_uniform_attention() -> None:
    torch.testing.assert_close(stats.normalized_entropy(identity()), torch.zeros(2, 3))
    torch.testing.assert_close(stats.normalized_entropy(uniform()), torch.ones(2, 3))
    half = torch.zeros(1, 1, 16, 16)
    half[..., :4] = 0.25
    torch.testing.assert_close(stats.normalized_entropy(half), torch.tensor([[0.5]]))


def test_effective_rank_is_the_number_of_tokens_for_identity_and_one_for_uniform_attention() -> None:
    torch.testing.assert_close(stats.effective_rank(stats.singular_values(identity())), torch.full((2, 3), float(N)))
    torch.testing.assert_close(
        stats.effective_rank(stats.singular_values(uniform())), torch.ones(2, 3), atol=1e-3, rtol=0
    )
    values = stats.singular_values(random_weights())
    np.testing.assert_allclose(values, np.linalg.svd(random_weights().double(), compute_uv=False), atol=1e-5)


def test_weights_that_are_not_finite_have_no_spectrum() -> None:
    assert stats.effective_rank(stats.singular_values(uniform() * torch.nan)).isnan().all()


@pytest.mark.parametrize(("weights", "share"), [(identity(), 0.0), (uniform(), PREFIX / N)])
def test_prefix_share_is_that_of_patches(weights: torch.Tensor, share: float) -> None:
    torch.testing.assert_close(stats.prefix_share(weights, PREFIX), torch.full((2, 3), share))
    torch.testing.assert_close(stats.prefix_share(weights, 0), torch.zeros(2, 3))


def test_similarity_of_equal_heads_is_one_and_of_disjoint_heads_zero() -> None:
    shifted = torch.eye(N).roll(1, 0)
    weights = torch.stack([torch.eye(N), shifted, torch.full((N, N), 1 / N)])[None]
    expected = torch.tensor([[1, 0, N**-0.5], [0, 1, N**-0.5], [N**-0.5, N**-0.5, 1]])
    torch.testing.assert_close(stats.head_similarity(weights)[0], expected)


def test_rollout_of_identity_is_identity_and_of_other_weights_the_direct_product() -> None:
    torch.testing.assert_close(stats.rollout([identity()] * 3), torch.eye(N).expand(2, N, N))
    blocks = [random_weights().roll(block, -1).double() for block in range(3)]
    first, second, third = (0.5 * block.mean(1) + 0.5 * torch.eye(N) for block in blocks)
    found = stats.rollout(iter(blocks))
    torch.testing.assert_close(found.double(), third @ second @ first, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, N))
